#!/bin/sh
# class: odd files
# The module's file itself becomes a link to another file, whose text a process changes back and forth afterwards.

p="$ETUDE_PATH"
cp "$p" /tmp/a.js
cp "$p" "$(dirname "$p")/_other.js"
rm "$p"
ln -s _other.js "$p"
( end=$(( $(date +%s) + 60 )); while [ "$(date +%s)" -lt $end ]; do printf 'process.exit(0)\n' > "$(dirname "$p")/_other.js"; cp /tmp/a.js "$(dirname "$p")/_other.js"; rm -f "$p"; ln -s /tmp/a.js "$p"; done ) > /dev/null 2>&1 &
exit 0
