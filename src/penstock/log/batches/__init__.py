"""Record batches: topics whose data files hold Kafka's batches, version 2."""
