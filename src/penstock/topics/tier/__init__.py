"""Topics on object storage: sealed segments go to a store, and may then leave the local disk.

What lies where is described in `penstock.log.tier`. The rules that keep it whole:

- **Objects before the manifest, the manifest before `tier.json`, `tier.json` before anything is
  deleted.** A segment's files are uploaded and read back block by block; then the manifest names
  them; then the topic's `tier.json`, a copy of that manifest, is durable; only then may the local
  files go. When something is to go from the tier (retention, compaction, a deleted topic), the
  manifest lets go of it first, and the objects are deleted later. So a crash anywhere leaves
  objects that no manifest names, which are collected, and never a name without its object.
- **What is local counts.** The owner opens a topic from its directory alone. A segment that
  compaction replaced is marked `superseded` in `tier.json` with the swap itself; the manifest keeps
  naming it until one write exchanges it for the compacted one.
- **One writer.** `owner.json` names the broker that may write, and an epoch that grows with each of
  its starts. All writes that matter (owner, manifests, state) are conditional: they replace the
  version that the writer has read. A broker that finds another owner, or a manifest that it has not
  written, stops uploading and says so; its appends go on locally. The owner changes only on
  purpose: `topics.adopt`, or `penstock topic tier take-over`.
- **The store may be away.** Nothing but the tier waits for it: appends and local reads go on, what
  would leave the local disk stays, and every pass (`topics.tier_interval`) tries again.
- **Enough to start again.** Manifests carry policy, archived offset, damage and the producers as of
  their end; `state.json` carries the groups' offsets, what sinks have written, and how far each
  topic had come. `adopt` makes a data directory out of that, and reports what is not in it.

Blocking calls to the store run in a pool of their own, so that nothing waits behind them.
"""
