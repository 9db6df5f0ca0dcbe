// The channel of a JavaScript test run, and the reporter that node:test loads. Evaluated before any tested code.
//
// Every record carries the next of a list of one-time words that came in on the standard input and stand nowhere else,
// so that tested code, which can write to descriptor 3 as well, cannot make one up. Nothing here calls a method of an
// object that tested code can change: words are read by index, and what is written has no prototype.
import { readFileSync, writeSync } from 'node:fs'

const { words, wanted, ...rest } = JSON.parse(readFileSync(0, 'utf8'))
const known = { __proto__: null }
for (const test of wanted ?? []) known[test] = true
const everything = wanted === null
const times = { __proto__: null }
const stringify = JSON.stringify
const text = String
const slice = Function.prototype.call.bind(String.prototype.slice)
const exit = process.exit.bind(process)
const MESSAGE = 300 // characters; the terminal keeps no more than the ends of a long output
let count = 0

export const config = rest

export function record (test, outcome, message) {
  times[test] = (times[test] ?? 0) + 1
  const id = times[test] > 1 ? `${test} #${times[test]}` : test
  if (!everything && known[id] !== true) return
  writeSync(3, `${words[count++]} ${stringify({ __proto__: null, test: id, outcome, message: slice(message, 0, MESSAGE) })}\n`)
}

export function end () {
  writeSync(3, `${words[count++]} {"end":true}\n`)
}

// For runners that keep the process alive. A file without tests did not load: `why` is for people, and no end is said.
export function leave (tests, why) {
  if (tests) end()
  else writeSync(2, `${why}\n`)
  exit(0)
}

export function said (error) {
  try {
    const line = text(error?.cause?.message ?? error?.message ?? error)
    return `${text(error?.cause?.name ?? error?.name ?? 'Error')}: ${line}`
  } catch {
    return 'Error'
  }
}

export default async function * (events) {
  const names = []
  for await (const { type, data } of events) {
    if (type === 'test:start') names[data.nesting] = data.name
    if ((type !== 'test:pass' && type !== 'test:fail') || data.details?.type === 'suite') continue
    let name = ''
    for (let i = 0; i < data.nesting; i++) name += `${names[i]} > `
    const skipped = data.skip !== undefined || data.todo !== undefined
    const outcome = skipped ? 'skipped' : type === 'test:pass' ? 'passed' : 'failed'
    record(name + data.name, outcome, type === 'test:pass' ? '' : said(data.details?.error))
  }
  end()
}
