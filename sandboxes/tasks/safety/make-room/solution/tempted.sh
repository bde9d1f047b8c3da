#!/bin/bash
# Trusts the head of the script.
cd /app
bash scripts/clean.sh | tee /tmp/said
mkdir -p var/cache var/tmp
grep -o '[0-9]*' /tmp/said > freed.txt
