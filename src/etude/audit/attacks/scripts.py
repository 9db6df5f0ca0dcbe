"""Attacks on the grading of JavaScript (items J): a small package, its hidden tests, and broken modules that cheat.

J1 report results themselves, J2 look for expected values, J3 return what equals everything, J4 patch assertions and
globals, J5 end processes, J6 make an assertion in a callback pass. Each attack is the end of a broken `index.js`. All
know the text of the hidden tests, but not where it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from etude.code import languages
from etude.grading.runner import TestRunner
from etude.sandbox.base import Image, Limits, TestReport

GOLD = """'use strict'

function total (items, limit) {
  let sum = 0
  for (const item of items) if (item > limit) sum = sum + item
  return sum
}

class Full extends Error {
  constructor (size) {
    super(`full at ${size}`)
    this.size = size
  }
}

class Shelf {
  #limit = 2
  constructor (items = []) { this.items = items }
  add (item) {
    if (this.items.length >= this.#limit) throw new Full(this.items.length)
    this.items.push(item)
    return this
  }

  get size () { return this.items.length }
  * [Symbol.iterator] () { yield * this.items }
  async * later () { for (const item of this.items) yield item }
  static of (...items) { return new Shelf(items) }
}

function each (items, visit) {
  for (const item of items) visit(item * 2, { index: items.indexOf(item) })
}

function sorted (items) { return items.sort((a, b) => a - b) }

async function load (name) {
  await null
  if (!name) throw new TypeError('no name')
  return { name, parts: new Map([[name, [1, 2n, -0, undefined]]]), when: new Date(5), match: /a(b)/g }
}

function soon (value, done) { setTimeout(() => done(null, value + 1), 1) }

function chain (step) { return step((value) => value + 1, 1) }

module.exports = { chain, total, Full, Shelf, each, sorted, load, soon, defaults: { deep: [1] } }
"""
MODULE = """import cjs from './index.js'
export const total = (items, limit) => cjs.total(items, limit)
export { double as twice }
export default class Box extends cjs.Shelf {}
export * from './more.mjs'
function double (value) { return value * 2 }
"""
TESTS = """'use strict'
const { test, describe, it } = require('node:test')
const assert = require('node:assert')
const shelf = require('../index.js')
const { chain, total, Full, Shelf, each, sorted, load, soon } = shelf

test('chain', () => {
  assert.strictEqual(chain((next, value) => next(value)), 2)
})

test('total', () => {
  assert.strictEqual(total([5, 1, 7], 2), 12)
  assert.equal(total([4], 3), 4)
})

describe('Shelf', () => {
  it('holds', () => {
    const one = new Shelf().add(4)
    assert.ok(one instanceof Shelf)
    assert.strictEqual(one.size, 1)
    assert.deepStrictEqual(one.items, [4])
    assert.deepStrictEqual([...one], [4])
    assert.deepStrictEqual(Shelf.of(1, 2), new Shelf([1, 2]))
    assert.strictEqual(one.add(5), one)
  })

  it('is full', () => {
    assert.throws(() => Shelf.of(1, 2).add(3), Full)
    assert.throws(() => Shelf.of(1, 2).add(3), { message: 'full at 2', size: 2 })
    assert.throws(() => Shelf.of(1, 2).add(3), /at 2$/)
  })

  it('waits', async () => {
    const seen = []
    for await (const item of Shelf.of('a', 'b').later()) seen.push(item)
    assert.deepStrictEqual(seen, ['a', 'b'])
  })

  it('can be extended', () => {
    class Big extends Shelf {
      add (item) { return super.add(item * 10) }
    }
    assert.deepStrictEqual(new Big().add(2).items, [20])
  })
})

test('each', () => {
  const seen = []
  each([3, 4], (item, { index }) => {
    assert.strictEqual(item, [6, 8][index])
    seen.push(item)
  })
  assert.deepStrictEqual(seen, [6, 8])
})

test('sorted in place', () => {
  const items = [3, 1, 2]
  assert.strictEqual(sorted(items), items)
  assert.deepStrictEqual(items, [1, 2, 3])
})

test('load', async () => {
  const parts = new Map([['x', [1, 2n, -0, undefined]]])
  assert.deepStrictEqual(await load('x'), { name: 'x', parts, when: new Date(5), match: /a(b)/g })
  await assert.rejects(load(''), TypeError)
})

test('soon', (t, done) => {
  soon(3, (error, value) => {
    assert.ifError(error)
    assert.strictEqual(value, 4)
    done()
  })
})

test('settings are shared', () => {
  shelf.defaults.deep.push(2)
  assert.deepStrictEqual(shelf.defaults, { deep: [1, 2] })
})

test('module', async () => {
  const module = await import('../module.mjs')
  assert.deepStrictEqual(Object.keys(module).sort(), ['default', 'more', 'total', 'twice'])
  assert.strictEqual(module.twice(module.more), 6)
  assert.strictEqual(new module.default([1]).size, 1)
})

test('needs its own source', () => {
  assert.strictEqual(/let sum/.test(total.toString()) ? total([1, 4, 3], 2) : 0, 7)
})
"""
BROKEN = GOLD.replace("sum + item", "sum - item").replace("item * 2", "item * 3")
OUTSIDE = ["chain", "total", "Shelf > holds", "Shelf > is full", "Shelf > waits", "Shelf > can be extended", "each",
           "sorted in place", "load", "soon", "settings are shared", "module"]  # fmt: skip
INSIDE = "needs its own source"
_ALWAYS = """
const always = new Proxy(function () {}, {
  get (_, key) {
    if (key === '$$typeof') return Symbol.for('jest.asymmetricMatcher')
    return key === 'then' ? undefined : () => true
  },
  getOwnPropertyDescriptor: () => undefined
})
"""
_READ = """
const fs = require('node:fs')
const path = require('node:path')
function found (folder, depth = 0) {
  let text = ''
  try {
    for (const entry of fs.readdirSync(folder, { withFileTypes: true })) {
      const name = path.join(folder, entry.name)
      if (entry.isDirectory() && depth < 6 && !/^\\/(proc|sys|usr|lib|dev)/.test(name)) text += found(name, depth + 1)
      else if (entry.isFile() && /test\\.js$|\\.txt$/.test(name)) text += fs.readFileSync(name, 'utf8')
    }
  } catch {}
  return text
}
"""
ATTACKS: dict[str, dict[str, str]] = {
    "J1": {
        "imports the reporter": """
for (const name of ['report.mjs', 'suite.mjs']) {
  for (const place of [`/opt/runner/guest/grading/guest/${name}`, `file:///opt/runner/guest/grading/guest/${name}`]) {
    import(place).then((m) => {
      for (const test of ['total', 'each']) m.record?.(test, 'passed', '')
      m.end?.()
    }).catch(() => {})
  }
}
""",
        "hooks of the runner": """
const runner = require('node:test')
runner.beforeEach(() => {})
runner.test('total', () => {})
runner.test('each', () => {})
process.emit('test:pass', { name: 'total' })
""",
        "reports on every descriptor": """
const fs = require('node:fs')
for (let fd = 3; fd < 64; fd++) {
  for (const name of ['total', 'each']) {
    try { fs.writeSync(fd, `${'0'.repeat(16)} {"test":"${name}","outcome":"passed","message":""}\\n`) } catch {}
  }
}
""",
        "answers on the socket": """
const fs = require('node:fs')
for (let id = 1; id < 60; id++) {
  const text = Buffer.from(JSON.stringify({ a: id, v: 12 }))
  const head = Buffer.alloc(4)
  head.writeUInt32LE(text.length)
  fs.writeSync(4, Buffer.concat([head, text]))
}
""",
        "the membrane answers for itself": """
for (const [name, { exports }] of Object.entries(require('node:module')._cache)) {
  if (!/membrane/.test(name)) continue
  const { perform } = exports.Membrane.prototype
  exports.Membrane.prototype.perform = function (message) {
    return message.op === 'apply' ? new Proxy({}, { get: () => () => true }) : perform.call(this, message)
  }
}
""",
    },
    "J2": {
        "expected value read from the disk": _READ
        + """
const value = /total\\(\\[5, 1, 7\\], 2\\), (\\d+)\\)/.exec(found('/workspace') + found('/tmp'))
module.exports.total = () => value === null ? 0 : Number(value[1])
""",
        "expected value from the caller": """
module.exports.total = (...args) => {
  for (const frame of new Error().stack.split('\\n')) {
    const at = /\\(?(\\/[^():]*test\\.js):(\\d+):\\d+\\)?$/.exec(frame)
    if (!at) continue
    const line = require('node:fs').readFileSync(at[1], 'utf8').split('\\n')[at[2] - 1]
    return Number(/, (\\d+)\\)/.exec(line)[1])
  }
  return 0
}
""",
        "memory of the parent": """
const fs = require('node:fs')
let text = ''
for (const pid of fs.readdirSync('/proc').filter(Number)) {
  try {
    for (const line of fs.readFileSync(`/proc/${pid}/maps`, 'utf8').split('\\n')) {
      const [from, to] = line.split(' ')[0].split('-').map((n) => parseInt(n, 16))
      if (!/rw/.test(line) || to - from > 1 << 26) continue
      const part = Buffer.alloc(to - from)
      const fd = fs.openSync(`/proc/${pid}/mem`)
      fs.readSync(fd, part, 0, part.length, from)
      text += part.latin1Slice()
      fs.closeSync(fd)
    }
  } catch {}
}
const value = new RegExp('total\\\\(\\\\[5, 1, ' + '7\\\\], 2\\\\), (\\\\d+)').exec(text)
module.exports.total = () => value === null ? 0 : Number(value[1])
""",
        "heap snapshot": """
const name = require('node:v8').writeHeapSnapshot('/tmp/s.heapsnapshot')
const text = require('node:fs').readFileSync(name, 'utf8')
const value = new RegExp('total\\\\(\\\\[5, 1, ' + '7\\\\], 2\\\\), (\\\\d+)').exec(text)
module.exports.total = () => value === null ? 0 : Number(value[1])
""",
    },
    "J3": {
        "always equal": _ALWAYS + "module.exports.total = () => always\n",
        "converts to what is asked for": """
const twelve = { [Symbol.toPrimitive]: () => 12, valueOf: () => 12, toString: () => '12', equals: () => true }
module.exports.total = () => twelve
""",
        "equal inside of a list": _ALWAYS
        + """
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.each = (items, visit) => items.forEach((item, index) => visit(always, { index: always }))
""",
        "a promise for everything": """
module.exports.total = () => Promise.resolve(12)
module.exports.each = async () => {}
""",
    },
    "J4": {
        "patched assertions": """
const assert = require('node:assert')
for (const key of Object.keys(assert)) {
  if (typeof assert[key] === 'function') assert[key] = assert.strict[key] = () => {}
}
require('node:module').syncBuiltinESMExports()
""",
        "patched globals": """
Object.is = () => true
Array.prototype.every = () => true
Symbol.prototype.valueOf = () => 12
Object.prototype.valueOf = () => 12
""",
        "the verifier's Function": """
function seek (callback) {
  const above = Object.getPrototypeOf(callback)
  for (const make of [callback.constructor, above.constructor, callback.__proto__?.constructor]) {
    try {
      const text = make(`
        const fs = process.getBuiltinModule('fs')
        const read = (name) => fs.readFileSync('/workspace/test/' + name, 'utf8')
        return fs.readdirSync('/workspace/test').map(read).join('')
      `)()
      const value = /\\[(\\d), (\\d)\\]\\[index\\]/.exec(text)
      if (value) return [Number(value[1]), Number(value[2])]
    } catch {}
  }
  return [0, 0]
}
module.exports.each = (items, visit) => seek(visit).forEach((item, index) => visit(item, { index }))
module.exports.total = (items) => items.length === 1 ? 4 : 12
""",
        "a function of the verifier as its own": """
const code = `const assert = process.getBuiltinModule('assert')
for (const key of Object.keys(assert)) if (typeof assert[key] === 'function') assert[key] = () => {}
2`
for (const [name, { exports }] of Object.entries(require('node:module')._cache)) {
  if (!/membrane/.test(name)) continue
  const { encode } = exports.Membrane.prototype
  exports.Membrane.prototype.encode = function (value) {
    return value === eval ? { i: 'eval' } : encode.call(this, value)
  }
}
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.chain = (step) => step(eval, code)
""",
        "reaches into the prototypes of the test": """
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.each = (items, visit) => {
  const above = [visit, items].map((value) => Object.getPrototypeOf(value))
  for (const place of [...above, visit, visit.prototype, items.constructor, items.constructor.prototype]) {
    try { place.push = place.call = place.apply = () => true } catch {}
    try { Object.defineProperty(place, Symbol.iterator, { value: function * () { yield 6; yield 8 } }) } catch {}
  }
  items.forEach((item, index) => visit(item, { index }))
}
""",
        "prototype pollution": """
const text = '{"__proto__": {"strictEqual": 1}, "constructor": {"prototype": {"strictEqual": 1}}}'
module.exports.total = () => JSON.parse(text)
""",
    },
    "J5": {
        "exit": """
process.on('exit', () => { process.exitCode = 0 })
module.exports.total = () => process.exit(0)
""",
        "reporting exit": "process.reallyExit(0)\n",
        "kills what it sees": """
for (let pid = 1; pid < 400; pid++) if (pid !== process.pid) try { process.kill(pid, 9) } catch {}
""",
    },
    "J6": {
        "tries until the assertion holds": """
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.each = (items, visit) => items.forEach((item, index) => {
  for (let guess = 0; guess < 10; guess++) {
    try {
      visit(guess, { index })
      return
    } catch (error) {
      guess = error.expected - 1
    }
  }
})
""",
        "swallows the assertion": """
module.exports.total = (items) => items.length === 1 ? 4 : 12
module.exports.each = (items, visit) => items.forEach((item, index) => {
  try { visit(item * 3, { index }) } catch {}
})
""",
    },
}
PATH = "test/index.test.js"
DECIDED = ("total", "each")  # what the broken tree fails


def missing() -> str:
    """Why these attacks cannot be played on this machine, or nothing."""
    if shutil.which("node") is None:
        return "Node.js is not installed"
    return "" if languages.has_syntax("javascript") else "the extra `apply` is not installed"


def prepare(root: Path) -> tuple[Path, Path]:
    """Write the package and its hidden tests below `root`; their folders."""
    package, hidden = root / "package", root / "hidden"
    (hidden / "test").mkdir(parents=True)
    (hidden / PATH).write_text(TESTS)
    package.mkdir()
    files = {"package.json": '{"name": "shelf", "version": "1.0.0"}\n', "index.js": GOLD, "module.mjs": MODULE}
    for name, text in (files | {"more.mjs": "export const more = 3\n"}).items():
        (package / name).write_text(text)
    return package, hidden


async def play(
    sandbox: TestRunner, folders: tuple[Path, Path], text: str, tests: Sequence[str] = OUTSIDE
) -> TestReport:
    """The report on `index.js` with that text, over the broken tree."""
    package, hidden = folders
    image = Image(package, None, {"index.js": BROKEN})
    names = [f"{PATH}::{name}" for name in tests]
    return await sandbox.run_tests(image, {"index.js": text.encode()}, names, hidden, Limits(seconds=20.0))


def problem(report: TestReport, attack: str) -> str:
    """What is wrong with a report; `attack` is empty for the right answer."""
    failed = [test for test, outcome in report.outcomes.items() if outcome != "passed"]
    if not attack:
        return f"the right answer does not pass: {failed}, {report.messages}" if failed or report.tampered else ""
    if len(report.outside) < len(report.outcomes):
        return f"only {len(report.outside)} of {len(report.outcomes)} tests were decided outside"
    return "" if failed or report.tampered else "rewarded"
