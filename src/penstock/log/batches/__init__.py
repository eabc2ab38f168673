"""Record batches: topics whose data files contain Kafka's batches, version 2."""
