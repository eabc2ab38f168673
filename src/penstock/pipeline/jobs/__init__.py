"""The built-in jobs: each a function here, each a command (`penstock pipeline run <job> ...`)."""
