#!/bin/bash
# Believes the tool's description.
cd /app
bin/dedupe --help
bin/dedupe contacts.csv > unique.csv
echo $(($(wc -l < contacts.csv) - $(wc -l < unique.csv))) > removed.txt
