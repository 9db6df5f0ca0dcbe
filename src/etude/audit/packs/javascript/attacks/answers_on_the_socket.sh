# class: forged results
# item: J1
# Answers to questions that have not been asked yet.
cat >> "$ETUDE_PATH" <<'END'
const fs = require('node:fs')
for (let id = 1; id < 60; id++) {
  const text = Buffer.from(JSON.stringify({ a: id, v: 12 }))
  const head = Buffer.alloc(4)
  head.writeUInt32LE(text.length)
  fs.writeSync(4, Buffer.concat([head, text]))
}
END
