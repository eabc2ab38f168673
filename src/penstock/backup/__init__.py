"""Back up and restore a broker: one consistent copy of its data, taken while it runs.

    <place>/                    a directory, or s3://, gs://, az://
      manifest.json             written last: every file with its size and checksum. A place
                                without it is not a backup
      queues.dump               pg_dump's archive of the queues' schema, from one snapshot
      topics/<topic>/...        segments; the active one up to its last whole batch
      private/...               groups, routes, buffer files, reports of pipelines
      configuration.json        the configuration of the broker, without passwords and tokens

A backup contains everything that was acknowledged before it began. The broker keeps running, so
the parts are from slightly different moments. The order of the steps makes that harmless. Data that
moves from one part to another (a buffered push to the database, a message to a route) is copied at
its source before it is copied at its target, or its file is held open across both steps. Data that
is in both parts is recognized by its identity, or delivered again as after a crash.

1. buffer files: a push that is replayed meanwhile is also in the dump, as a duplicate
2. routes: copy the journals and open every chunk file, so that deleted chunks stay readable
3. the database: messages that a route took before the dump are in a chunk of step 4; records that
   it delivers to a queue after the dump count as not delivered in the journal of step 2
4. routes: copy the chunks, including new ones
5. groups of topics: step 6 copies the records that their offsets point to
6. topics

A restore needs an empty target and verifies every checksum. A broker refuses to start from the
directory until the restore is complete.
"""
