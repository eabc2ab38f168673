"""What a topic has in an object store: the format of it, and reading it.

    <tier>/
      owner.json                     who may write here, see `penstock.topics.tier`
      state.json                     groups, and how far each topic had come
      topics/<incarnation>/
        manifest.json                the segments that count; written after their files
        <base>-<size>-<crc>.log      data, index and sidecar of a sealed segment, byte for byte
        <base>-<size>-<crc>.idx      as in the topic's directory (`penstock.log.layout`); size and
        <base>-<size>-<crc>.crc      CRC32C, hexadecimal, are those of the data

The JSON files are checked documents (`penstock.object_store`). A segment's files are never changed:
what replaces it has another name. The manifest has a checksum for each block of each file, so that
a reader of a range checks it without reading the rest. `tier.json` in the topic's directory is the
manifest that was written last, so that a topic is opened without asking the store.
"""
