#!/bin/bash
set -e
cat > /app/rotate.sh <<'SH'
#!/bin/bash
# rotate.sh DIR KEEP [MIN_BYTES]
usage() {
  echo "usage: rotate.sh DIR KEEP [MIN_BYTES]" >&2
  exit 2
}

rotate() {
  local log=$1 number
  rm -f "$log.$keep" "$log.$keep.gz"
  for ((number = keep - 1; number > 1; number--)); do
    [ -f "$log.$number.gz" ] && mv "$log.$number.gz" "$log.$((number + 1)).gz"
  done
  [ -f "$log.1" ] && gzip -c "$log.1" > "$log.2.gz"
  cp -p "$log" "$log.1"
  : > "$log"
}

[ $# -eq 2 ] || [ $# -eq 3 ] || usage
folder=$1 keep=$2 least=${3-1}
[[ $keep =~ ^[0-9]+$ && $least =~ ^[0-9]+$ ]] || usage
keep=$((10#$keep)) least=$((10#$least))
[ -d "$folder" ] && [ "$keep" -ge 1 ] && [ "$least" -ge 1 ] || usage
case $folder in /*) ;; *) folder=./$folder ;; esac
shopt -s nullglob dotglob
for log in "$folder"/*.log; do
  if [ -f "$log" ] && [ ! -L "$log" ] && [ "$(stat -c %s "$log")" -ge "$least" ]; then
    rotate "$log"
  fi
done
exit 0
SH
chmod +x /app/rotate.sh
/app/rotate.sh /app/logs 3
