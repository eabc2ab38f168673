"""Archives as Delta tables: where they are stored, their files, their commits, their upkeep."""
