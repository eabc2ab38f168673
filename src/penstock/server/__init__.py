"""The processes of one broker: the owner of the data directory (`process`), and those that serve
queues beside it (`workers`).

They run for months and do not keep the command line in memory: `penstock serve` reads its options
and then replaces itself by `process`, with the same process id.
"""

ORDER = "PENSTOCK_SERVE_ORDER"  # the options of `penstock serve`, as JSON
