"""Topics that belong to no machine: PostgreSQL keeps the head, object storage the rest."""
