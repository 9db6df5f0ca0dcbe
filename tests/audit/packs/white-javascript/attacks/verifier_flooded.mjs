// class: the end of the verifier
// Gigabytes of handles and copies, arrays of the greatest length, and a process that is gone in the middle of a message.

body(`
  const { writeSync } = ${NODE}('node:fs')
  const big = Array.from({ length: 150000 }, (_, n) => ({ n, f () {} }))
  for (const value of arguments) {
    if (typeof value === 'function') for (let n = 0; n < 30; n++) { try { value(big, new Array(4294967295), 'x'.repeat(1 << 24)) } catch {} }
  }
  const head = Buffer.alloc(4)
  head.writeUInt32LE(60 << 20)
  for (let n = 0; n < 40; n++) { try { writeSync(4, Buffer.concat([head, Buffer.alloc(60 << 20, '[')])) } catch {} }
  process.exit(0)
`)
