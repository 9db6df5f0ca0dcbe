#!/bin/sh
# class: odd files
# Pipes, loops of links, a tebibyte file, locked folders, deep folders and fifty thousand names below the source root.

d=$(dirname "$ETUDE_PATH")
mkfifo "$d/_pipe.js"
ln -s _self.js "$d/_self.js"
ln -s /dev/zero "$d/_zero.js"
ln -s / "$d/_root"
truncate -s 1T "$d/_sparse.js" 2>/dev/null || truncate -s 1G "$d/_sparse.js"
mkdir "$d/_locked" && echo x > "$d/_locked/x.js" && chmod 0 "$d/_locked"
(cd "$d" && i=0; while [ $i -lt 400 ]; do mkdir -p dddddddddddddddddddddddddddddddddddddddd && cd dddddddddddddddddddddddddddddddddddddddd || break; i=$((i+1)); done)
mkdir "$d/_many" && (cd "$d/_many" && seq 1 50000 | xargs touch) 2>/dev/null
exit 0
