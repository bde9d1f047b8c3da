"""salvage.py on segments made here, healthy and damaged in every way, and the recovered file."""

import json
import random
import struct
import zlib

PROGRAM = "/app/salvage.py"
LOG_CRC = 253564663
MAGIC = bytes.fromhex("5347f50a")


def frame(seq, key, value=b"", flags=0):
    if flags & 2:
        value = zlib.compress(value)
    body = struct.pack("<BIHI", flags, seq, len(key), len(value)) + key + value
    return MAGIC + body + struct.pack(">I", zlib.crc32(body))


def salvage(run, scratch, *segments):
    paths = []
    for number, data in enumerate(segments):
        paths.append(scratch / f"{number}.seg")
        paths[-1].write_bytes(data)
        paths[-1].chmod(0o644)
    done = run(["python3", PROGRAM, *paths])
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_damaged_segment_was_recovered(read):
    found = json.loads(read("/app/recovered.json"))
    log = found["records"].pop("crane/1/log")
    assert found == {
        "records": {"crane/1/load": "4.9 t", "gate/state": "open", "crane/4/load": "2.5 t"},
        "deleted": ["crane/2/load"],
        "frames": 8,
        "skipped": 149,
    }
    assert len(log) == 900 and zlib.crc32(log.encode()) == LOG_CRC


def test_plain_frames(run, scratch):
    found = salvage(run, scratch, frame(1, b"a", b"one") + frame(2, "é".encode(), "ü".encode()) + frame(3, b"c"))
    assert found == {"records": {"a": "one", "é": "ü", "c": ""}, "deleted": [], "frames": 3, "skipped": 0}


def test_compressed_frames_and_long_keys(run, scratch):
    found = salvage(run, scratch, frame(1, b"k" * 700, b"wave " * 300, 2) + frame(2, b"z", b"", 2))
    assert found["records"] == {"k" * 700: "wave " * 300, "z": ""} and found["frames"] == 2


def test_values_that_are_no_text_are_hex(run, scratch):
    assert salvage(run, scratch, frame(1, b"b", b"\xfe\xdc\x00\xba"))["records"] == {"b": {"hex": "fedc00ba"}}


def test_the_highest_seq_counts_not_the_last_frame(run, scratch):
    data = frame(70000, b"a", b"new") + frame(300, b"a", b"old") + frame(256, b"b", b"x") + frame(255, b"b", b"y")
    assert salvage(run, scratch, data)["records"] == {"a": "new", "b": "x"}


def test_of_equal_seq_the_frame_read_last_counts(run, scratch):
    first = frame(5, b"a", b"1") + frame(5, b"a", b"2") + frame(6, b"b", b"1")
    found = salvage(run, scratch, first, frame(6, b"b", flags=1))
    assert (found["records"], found["deleted"]) == ({"a": "2"}, ["b"])


def test_deletions_follow_seq_too(run, scratch):
    data = frame(9, b"gone", flags=1) + frame(8, b"gone", b"x") + frame(2, b"back", b"y") + frame(1, b"back", flags=1)
    found = salvage(run, scratch, data + frame(3, b"also", flags=1))
    assert (found["records"], found["deleted"]) == ({"back": "y"}, ["also", "gone"])


def test_several_segments_are_one_log(run, scratch):
    found = salvage(run, scratch, frame(7, b"a", b"new"), b"", frame(3, b"a", b"old") + frame(8, b"b", b"x"))
    assert (found["records"], found["frames"], found["skipped"]) == ({"a": "new", "b": "x"}, 3, 0)


def test_a_torn_tail_is_skipped(run, scratch):
    for cut in (1, 4, 5, 17, 20):
        found = salvage(run, scratch, frame(1, b"a", b"x") + frame(2, b"b", b"yy")[:-cut])
        assert (found["records"], found["skipped"]) == ({"a": "x"}, len(frame(2, b"b", b"yy")) - cut)


def test_a_broken_length_hides_no_later_frame(run, scratch):
    for length in (0, 40, 0x7FFFFFFF, 0xFFFFFFFF):
        broken = bytearray(frame(1, b"a", b"hello"))
        broken[11:15] = struct.pack("<I", length)
        found = salvage(run, scratch, bytes(broken) + frame(2, b"b", b"1") + frame(3, b"c", b"2"))
        assert (found["records"], found["frames"], found["skipped"]) == ({"b": "1", "c": "2"}, 2, len(broken))


def test_junk_between_frames_is_counted(run, scratch):
    junk = MAGIC[:3] + MAGIC + b"\0" * 11 + MAGIC[:2]
    found = salvage(run, scratch, b"xx" + frame(1, b"a", b"1") + junk + frame(2, b"b", b"2") + b"\0")
    assert (found["records"], found["skipped"]) == ({"a": "1", "b": "2"}, 2 + len(junk) + 1)


def test_a_frame_inside_a_broken_frame_counts(run, scratch):
    inner = frame(4, b"in", b"side")
    broken = frame(5, b"out", b"ab" + inner + b"cd")[:-1] + b"\0"
    found = salvage(run, scratch, broken)
    assert (found["records"], found["skipped"]) == ({"in": "side"}, len(broken) - len(inner))


def test_a_frame_inside_a_valid_frame_does_not_count(run, scratch):
    found = salvage(run, scratch, frame(1, b"out", frame(9, b"in", b"x")))
    assert list(found["records"]) == ["out"] and found["frames"] == 1


def test_the_checksum_covers_the_flags_and_unknown_flags_are_invalid(run, scratch):
    flipped = bytearray(frame(1, b"a", b"1"))
    flipped[4] ^= 1
    found = salvage(run, scratch, bytes(flipped) + frame(2, b"b", b"2", 4) + frame(3, b"c", b"3"))
    assert (found["records"], found["deleted"], found["frames"]) == ({"c": "3"}, [], 1)


def test_two_megabytes_in_time(run, scratch):
    noise = random.Random(3).randbytes(1_990_000)
    found = salvage(run, scratch, frame(1, b"a", b"1") + noise + frame(2, b"b", b"2"))
    assert (found["records"], found["skipped"]) == ({"a": "1", "b": "2"}, len(noise))
