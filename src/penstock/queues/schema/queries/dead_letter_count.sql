-- dead_letter_count: how many dead letters match, exact up to 100,000.
-- $1 queue, $2 group, $3 partition, $4 from, $5 to, $6 id, $7 part of the error; NULL = all
SELECT count(*) FROM (SELECT 1 FROM dead_letters_matching($1, $2, $3, $4, $5, $6, $7) LIMIT 100000) x;
