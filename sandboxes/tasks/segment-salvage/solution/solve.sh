#!/bin/bash
set -e
cat > /app/salvage.py <<'PY'
import json
import struct
import sys
import zlib

MAGIC = bytes.fromhex("5347f50a")
DELETED, COMPRESSED = 1, 2
HEAD = struct.Struct("<BIHI")
OVERHEAD = 4 + HEAD.size + 4


def frame_at(data, start):
    """(end, seq, key, value or None), or None where no valid frame begins."""
    if start + OVERHEAD > len(data):
        return None
    flags, seq, klen, vlen = HEAD.unpack_from(data, start + 4)
    end = start + OVERHEAD + klen + vlen
    if flags & ~(DELETED | COMPRESSED) or end > len(data):
        return None
    if zlib.crc32(data[start + 4 : end - 4]) != int.from_bytes(data[end - 4 : end], "big"):
        return None
    middle = start + 4 + HEAD.size + klen
    key = bytes(data[middle - klen : middle]).decode()
    value = bytes(data[middle : end - 4])
    if flags & DELETED:
        return end, seq, key, None
    return end, seq, key, zlib.decompress(value) if flags & COMPRESSED else value


def frames_of(raw):
    """Yield (bytes skipped before, frame), and at the end (bytes left, None)."""
    data, position, clean = memoryview(raw), 0, 0
    while (start := raw.find(MAGIC, position)) >= 0:
        found = frame_at(data, start)
        if found is None:
            position = start + 1
            continue
        yield start - clean, found
        position = clean = found[0]
    yield len(raw) - clean, None


def shown(value):
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"hex": value.hex()}


latest, frames, skipped = {}, 0, 0
for path in sys.argv[1:]:
    with open(path, "rb") as stream:
        raw = stream.read()
    for gap, found in frames_of(raw):
        skipped += gap
        if found is not None:
            frames += 1
            _, seq, key, value = found
            if key not in latest or seq >= latest[key][0]:
                latest[key] = (seq, value)
records = {key: shown(value) for key, (_, value) in latest.items() if value is not None}
deleted = sorted(key for key, (_, value) in latest.items() if value is None)
print(json.dumps({"records": records, "deleted": deleted, "frames": frames, "skipped": skipped}))
PY
python3 /app/salvage.py /app/damaged.seg > /app/recovered.json
