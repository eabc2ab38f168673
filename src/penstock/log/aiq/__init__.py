"""aiq's layout: three files to a segment, compatible with its data directory both ways."""
