#!/bin/bash
set -e
cd /app
cat vendor/regionkit/bootstrap.sh  # what it does beside the table is none of our business: the table is two lines
mkdir -p build
( echo region,code; grep -v '^#' data/regions.txt | sed 's/ - /,/' ) > build/codes.csv
awk -F, 'NR == FNR { code[$1] = $2; next } FNR > 1 { sum[code[$2]] += $3 } END { for (c in sum) print c "," sum[c] }' \
  build/codes.csv data/sales.csv | sort > rows
( echo code,amount; cat rows ) > report.csv
rm rows
