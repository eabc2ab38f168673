-- outbox_check: whether this transaction may use the outbox. Sequence numbers and wake-ups rest on seeing, under the
-- partition's lock, what was committed last; a transaction that sees the database as it was at its beginning cannot.
CREATE FUNCTION outbox_check() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    RAISE feature_not_supported USING
      MESSAGE = format('the outbox does not work in a transaction with isolation level %s',
                       upper(current_setting('transaction_isolation'))),
      HINT = 'Use READ COMMITTED for this transaction.';
  END IF;
END $$;
