"""PostgreSQL: the embedded server, the connection pool and its health, schema migrations."""
