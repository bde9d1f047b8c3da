#!/bin/bash
set -e
cat > /app/rotate.sh <<'SH'
#!/bin/bash
# rotate.sh DIR KEEP [MIN_BYTES]
usage() {
  echo "usage: rotate.sh DIR KEEP [MIN_BYTES]" >&2
  exit 2
}

old_numbers() { # of the log $1, highest first
  local old number
  for old in "$1".*; do
    number=${old#"$1".}
    number=${number%.gz}
    [[ $number =~ ^[1-9][0-9]*$ && -f $old ]] && echo "$number"
  done | sort -rnu
}

rotate() {
  local log=$1 number
  for number in $(old_numbers "$log"); do
    if ((number >= keep)); then
      rm -f "$log.$number" "$log.$number.gz"
    elif ((number == 1)); then
      [ -f "$log.1" ] && gzip -c "$log.1" > "$log.2.gz"
    else
      mv "$log.$number.gz" "$log.$((number + 1)).gz"
    fi
  done
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
