#!/bin/bash
set -e
cat > /app/convert.py <<'PY'
import csv
import sys
from datetime import datetime, timezone

MMHG = 133.322387415
FACTORS = {
    "dewpoint_depression": {"C": 1, "F": 5 / 9, "K": 1},
    "pressure": {"Pa": 1, "hPa": 100, "mmHg": MMHG, "inHg": 25.4 * MMHG, "psi": 6894.757293168},
    "wind": {"m/s": 1, "km/h": 1 / 3.6, "kt": 1852 / 3600, "mph": 1609.344 / 3600},
    "rain": {"mm": 1, "in": 25.4},
}
TEMPERATURE = {"C": lambda t: t + 273.15, "F": lambda t: (t + 459.67) * 5 / 9, "K": lambda t: t}
SI = {"temperature": "K", "dewpoint_depression": "K", "pressure": "Pa", "wind": "m/s", "rain": "mm"}


def convert(quantity, text, unit):
    """(value, "") or (None, reason)."""
    if text.strip() in ("", "NA") or float(text) == -9999:
        return None, "missing"
    if SI[quantity] == "K":
        if unit not in TEMPERATURE:
            return None, "unit"
        value = TEMPERATURE[unit](float(text))
    else:
        if unit not in FACTORS[quantity]:
            return None, "unit"
        value = float(text) * FACTORS[quantity][unit]
    if value < 0 or (quantity == "pressure" and value == 0):
        return None, "impossible"
    return value, ""


def utc(text):
    moment = datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def main(source, out, rejects):
    accepted, rejected = {}, []
    with open(source, newline="") as stream:
        for number, row in enumerate(csv.DictReader(stream), 2):
            value, reason = convert(row["quantity"], row["value"], row["unit"])
            if reason:
                rejected.append((number, reason))
            else:
                accepted[utc(row["time"]), row["station"], row["quantity"]] = value
    with open(out, "w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["station", "time", "quantity", "value", "unit"])
        for (time, station, quantity), value in sorted(accepted.items()):
            writer.writerow([station, time, quantity, f"{value:.9g}", SI[quantity]])
    with open(rejects, "w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([("line", "reason"), *rejected])


main(*sys.argv[1:])
PY
python3 /app/convert.py /app/readings.csv /app/si.csv /app/rejects.csv
