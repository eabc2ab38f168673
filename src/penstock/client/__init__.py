"""The Python client: async first, with a sync facade."""
