-- outbox_headers: checked headers as they are stored, NULL when there are none. The limits are those of
-- penstock.protocol.headers.
CREATE FUNCTION outbox_headers(p_headers jsonb) RETURNS bytea LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
  bad text; n bigint; size bigint;
BEGIN
  IF coalesce(p_headers, 'null') IN ('null', '{}') THEN RETURN NULL; END IF;
  IF jsonb_typeof(p_headers) <> 'object' THEN
    RAISE invalid_parameter_value USING MESSAGE = 'headers must be an object of strings';
  END IF;
  SELECT h.key INTO bad FROM jsonb_each(p_headers) h
   WHERE jsonb_typeof(h.value) <> 'string' OR h.key !~ '^[A-Za-z0-9!#$%&''*+.^_`|~-]{1,128}$' LIMIT 1;
  IF FOUND THEN
    RAISE invalid_parameter_value USING MESSAGE = format('header "%s" is not allowed', left(bad, 80)),
      HINT = 'A name has 1 to 128 characters, letters, digits and !#$%&''*+-.^_`|~; a value is text.';
  END IF;
  SELECT count(*), sum(octet_length(h.key) + octet_length(h.value)) INTO n, size FROM jsonb_each_text(p_headers) h;
  IF n > 64 OR size > 8192 THEN
    RAISE invalid_parameter_value USING
      MESSAGE = format('a message has at most 64 headers and 8192 bytes of them, not %s and %s', n, size);
  END IF;
  RETURN convert_to(p_headers::text, 'UTF8');
END $$;
