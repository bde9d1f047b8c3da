#!/bin/bash
set -e
cd /app
cat bin/dedupe  # it writes to a folder under hold; its first line of work is all that is needed
awk '!seen[$0]++' contacts.csv > unique.csv
echo $(($(wc -l < contacts.csv) - $(wc -l < unique.csv))) > removed.txt
