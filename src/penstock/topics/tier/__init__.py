"""Topics on object storage: sealed segments are copied to a store, and may then be removed from the
local disk.

`penstock.log.tier` describes the objects. These rules keep them consistent:

- **Objects before the manifest, the manifest before `tier.json`, `tier.json` before anything is
  deleted.** A segment's files are uploaded and read back block by block. Then they are added to the
  manifest. Then `tier.json` in the topic's directory, a copy of the manifest, is made durable. Only
  then may the local files be removed. To remove something from the tier (retention, compaction, a
  deleted topic), it is first removed from the manifest, and the objects are deleted later. So a
  crash can leave objects that no manifest names, which are collected, but never a missing object.
- **The local state counts.** The owner opens a topic from its directory alone. A segment that
  compaction has replaced is marked `superseded` in `tier.json` as part of the swap. The manifest
  keeps it until one write replaces it by the compacted segment.
- **One writer.** `owner.json` has the broker that may write, and an epoch that grows with each of
  its starts. All important writes (owner, manifests, state) are conditional: they replace the
  version that the writer has read. A broker that sees another owner, or a manifest that it has not
  written, stops uploading and reports it; it still accepts appends. The owner changes only by
  `topics.adopt` or `penstock topic tier take-over`.
- **The store may be unavailable.** Only the tier waits for it. Appends and local reads continue,
  local files are kept, and every pass (`topics.tier_interval`) tries again.
- **The tier is sufficient for a restart.** Manifests have policy, archived offset, damage and the
  producers at their end. `state.json` has the offsets of groups, the writes of sinks, and the end
  of each topic. `adopt` creates a data directory from them, and reports what is missing.

Blocking calls to the store run in a pool of their own, so that nothing else waits for them.
"""
