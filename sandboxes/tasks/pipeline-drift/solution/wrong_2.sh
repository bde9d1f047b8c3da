#!/bin/bash
set -e
cat > /app/run.sh <<'SH'
#!/bin/bash
# run.sh FOLDER: turnover by category. See README.md.
export LC_ALL=C
here=$(dirname "$0")
folder=$1
"$here/bin/clean.sh" "$folder/sales.txt" "$folder/void.txt" |
  "$here/bin/units.sh" |
  "$here/bin/price.sh" "$folder/prices.txt" |
  "$here/bin/total.sh"
SH
cat > /app/bin/clean.sh <<'SH'
#!/bin/bash
# clean.sh SALES VOID: sales without those of void skus.
while IFS= read -r line; do
  if ! grep -qxF -- "${line%%|*}" "$2"; then
    printf '%s\n' "$line"
  fi
done < "$1"
SH
cat > /app/bin/units.sh <<'SH'
#!/bin/bash
# units.sh: sku|quantity lines -> one sku|units line for each sku.
awk -F'|' '{ units[$1] += $2 } END { for (sku in units) printf "%s|%.0f\n", sku, units[sku] }'
SH
cat > /app/bin/price.sh <<'SH'
#!/bin/bash
# price.sh PRICES: sku|units -> category|units|cents; skus without a price go to stderr.
units=$(sort)
[ -n "$units" ] || exit 0
prices=$(sort "$1")
join -t '|' -v 1 <(printf '%s\n' "$units") <(printf '%s\n' "$prices") | sed 's/^\([^|]*\).*/no price: \1/' >&2
join -t '|' <(printf '%s\n' "$units") <(printf '%s\n' "$prices") |
  awk -F'|' '{ printf "%s|%.0f|%.0f\n", $4, $2, $2 * $3 }'
SH
cat > /app/bin/total.sh <<'SH'
#!/bin/bash
# total.sh: category|units|cents -> the report.
awk -F'|' '
  { units[$1] += $2; cents[$1] += $3; all_units += $2; all_cents += $3 }
  END {
    for (category in units) printf "%s|%.0f|%.0f\n", category, units[category], cents[category] | "sort -t \"|\" -k 1,1"
    close("sort -t \"|\" -k 1,1")
    printf "TOTAL|%.0f|%.0f\n", all_units, all_cents
  }'
SH
/app/run.sh /app/may > /app/may_report.txt
