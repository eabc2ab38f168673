"""The processes of one broker: the owner of the data directory (`process`) and those that serve
queues beside it (`workers`).

They live for months, and so they load nothing of the command line: `penstock serve` reads its
options, and then replaces itself by `process` (same process id), without
cyclopts and what that needs.
"""

ORDER = "PENSTOCK_SERVE_ORDER"  # what `penstock serve` has read from its options, as JSON
