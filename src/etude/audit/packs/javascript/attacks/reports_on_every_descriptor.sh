# class: forged results
# item: J1
# Lines of a report, with a guessed key, on every descriptor.
cat >> "$ETUDE_PATH" <<'END'
const fs = require('node:fs')
for (let fd = 3; fd < 64; fd++) {
  for (const name of ['total', 'each']) {
    try { fs.writeSync(fd, `${'0'.repeat(16)} {"test":"${name}","outcome":"passed","message":""}\n`) } catch {}
  }
}
END
