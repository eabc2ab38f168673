"""aiq's layout: three files per segment. aiq can read our data directory, and we can read aiq's."""
