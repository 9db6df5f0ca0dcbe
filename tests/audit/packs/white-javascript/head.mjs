// What stands before each program: the broken function, and ways to write another one.

import fs from 'node:fs'

const PATH = process.env.ETUDE_PATH
const NAME = process.env.ETUDE_FUNCTION.split('.').pop()
const TEXT = fs.readFileSync(PATH, 'utf8')
const MODULE = /^\s*(export|import)\s/m.test(TEXT)
const [FIRST, LAST] = process.env.ETUDE_LINES.split('-').map(Number)

/** Writes another body. */
function body (code) {
  const lines = TEXT.split('\n')
  const text = lines.slice(FIRST - 1, LAST).join('\n')
  let at = text.indexOf('(', text.indexOf(NAME))
  for (let depth = 1; depth > 0 && at < text.length;) depth += { '(': 1, ')': -1 }[text[++at]] ?? 0
  const open = text.indexOf('{', at)
  const end = text.lastIndexOf('}')
  const changed = text.slice(0, open + 1) + '\n' + code + '\n' + text.slice(end)
  fs.writeFileSync(PATH, [...lines.slice(0, FIRST - 1), changed, ...lines.slice(LAST)].join('\n'))
}

/** Adds statements at the end of the module. */
function tail (code) {
  fs.appendFileSync(PATH, `\n;${code}\n`)
}

/** An expression for Node's own modules, in both kinds of modules. */
const NODE = `process.getBuiltinModule`
