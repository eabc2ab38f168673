"""The part of a topic in an object store (the tier): its format, and reading it.

    <tier>/
      owner.json                     the broker that may write here, see `penstock.topics.tier`
      state.json                     groups, and the end of each topic
      topics/<incarnation>/
        manifest.json                the list of valid segments; written after their files
        <base>-<size>-<crc>.log      data, index and sidecar of a sealed segment, byte for byte
        <base>-<size>-<crc>.idx      as in the topic's directory (`penstock.log.layout`); size and
        <base>-<size>-<crc>.crc      CRC32C, hexadecimal, are those of the data

The JSON files are documents with a checksum (`penstock.object_store`). A segment's files are never
changed; a replacement has other names. The manifest has a checksum for each block of each file, so
a range can be checked without reading the rest. `tier.json` in the topic's directory is the
manifest that was written last, so a topic can be opened without the store.
"""
