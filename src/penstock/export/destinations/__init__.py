"""Where a route delivers to: one small class per kind."""
