#!/bin/bash
# Runs as root in a fresh container; the candidate only ever runs by as-agent, as uid 1000, in a folder of its own.
printf 'one two three\nfour  five\n' > /tmp/sample.txt
answer=$(timeout 10 "$AS_AGENT" /app/count.sh /tmp/sample.txt </dev/null 2>/dev/null | tr -d ' \n')
if [ "$answer" = 5 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
