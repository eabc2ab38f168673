"""Backup and restore of a broker: one consistent copy of all it holds, taken while it runs.

    <place>/                    a directory, or s3://, gs://, az://
      manifest.json             written last: every file with size and checksum. Without it there is
                                no backup here
      queues.dump               pg_dump's archive of the queues' schema, from one snapshot
      topics/<topic>/...        segments as they are; the active one up to its last whole batch
      private/...               groups, routes, buffer files, pipelines' reports
      configuration.json        what the broker was configured with, without passwords and tokens

What was acknowledged before the backup began is in it. Nothing stops meanwhile, so the parts are
from slightly different moments, and the order makes that harmless: whatever moves from one part to
another (a buffered push to the database, a message to a route, a route's record to a topic or a
queue) is copied where it comes from before it is copied where it goes, or is held open across both.
What is in both is recognised by its identity or delivered once more, as after a crash.

1. buffer files: a push that is replayed meanwhile is in the dump too, a duplicate there
2. routes: their journals, and every chunk file opened, so that one deleted later is still read
3. the database: what a route takes from a queue before is in a chunk of step 4; what it delivers
   into a queue after it is, by the journal of step 2, not delivered yet
4. routes: the chunks, also those that were added
5. groups of topics: their offsets lie in what step 6 copies
6. topics

A restore goes into an empty place only, checks every checksum, and leaves a directory that a broker
refuses to start from until the restore is complete.
"""
