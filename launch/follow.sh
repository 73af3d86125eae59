# Sourced by launch/setup.sh. `INSTALLER 2>&1 | follow LOG PACKAGES SITE_PACKAGES` says how far uv or pip is.
# It reads their lines and keeps all of them in LOG. A terminal has one line, which is written again each second.
# Elsewhere a line comes every 15 s. For uv it counts the sizes of large downloads that have ended.
# pip names one of the PACKAGES after another. Then it installs them into SITE_PACKAGES.
follow_every_s=15

follow() {
  local log="$1" packages="$2" site="$3" line last="" unit="" name size text terminal="" wait_s=5
  local done=0 total=0 before=0 named=0 begun=$SECONDS shown=$SECONDS
  local -A mib=()
  [ ! -t 1 ] || { terminal=yes; wait_s=1; }
  : > "$log"
  while IFS= read -r -t "$wait_s" line || [ $? -gt 128 ]; do  # above 128: there was no line in that time
    [ -z "$line" ] || { printf '%s\n' "$line" >> "$log"; last="$line"; }
    case "$line" in
      "Downloading "*" ("*iB")")
        name="${line#Downloading }" size="${line##*\(}"
        mib["${name%% *}"]="$(whole_mib "${size%)}")"
        unit="MiB downloaded" total=$((total + ${mib["${name%% *}"]})) ;;
      " Downloaded "*) done=$((done + ${mib["${line# Downloaded }"]:-0})) ;;
      "Collecting "*|"Processing "*) unit="packages fetched" done=$named named=$((named + 1)) total=$packages ;;
      "Installing collected packages: "*)
        name="${line//[^,]/}" unit="packages installed" total=$((${#name} + 1)) begun=$SECONDS
        before="$(distributions "$site")" ;;
    esac
    [ "$unit" != "packages installed" ] || done=$(($(distributions "$site") - before))
    text="${last:0:70}"
    if [ "$total" -gt 0 ] && [ "$done" -lt "$total" ]; then
      text="$done of $total $unit"
      [ "$done" -le 0 ] || text="$text, about $(((SECONDS - begun) * (total - done) / done)) s left"
    fi
    if [ -n "$terminal" ]; then
      printf '\r\033[Ksetup: [%3ds] %s' "$SECONDS" "$text"
    elif [ -n "$text" ] && [ $((SECONDS - shown)) -ge "$follow_every_s" ]; then
      shown=$SECONDS
      printf 'setup: [%3ds] %s\n' "$SECONDS" "$text"
    fi
  done
  [ -z "$terminal" ] || printf '\r\033[K'
}

# distributions SITE_PACKAGES: how many are installed
distributions() { find "$1" -maxdepth 1 -name '*.dist-info' | wc -l; }

# whole_mib 1.5GiB: 1536; what is less than a MiB is 0
whole_mib() {
  local size="${1%?iB}"
  case "$1" in
    *GiB) echo $((${size%.*} * 1024 + 1024 * ${size#*.} / 10)) ;;
    *MiB) echo "${size%.*}" ;;
    *) echo 0 ;;
  esac
}
