// What the tested process may do to objects of the verifier, and what it may answer.
//
// A kind says what a value is made of: nothing for plain values, a letter for each sort of handle in it. Kinds were
// recorded where the pristine library answered. A handle where that library gave a plain value fails the test: an object
// that is equal to everything cannot stand in for a number. So does an assertion that fails inside of a callback, which
// the library could catch and try again.
'use strict'

const { _cache } = require('node:module')
const { relative } = require('node:path')
const { types: { isModuleNamespaceObject, isProxy } } = require('node:util')

const MOST = 20_000 // recorded places
const REFUSED = new Set(['TestContext', 'SuiteContext', 'Context', 'Runnable', 'Test', 'Suite', 'Hook', 'Runner', 'Mocha', 'Module', 'Worker', 'ChildProcess', 'Script'])
const WRITES = new Set(['set', 'define', 'delete', 'inherit'])
const INHERITED = new Set(['prototype', '__proto__', 'constructor'])
const NAMED = new Set([
  'Object', 'Function', 'Array', 'String', 'Number', 'Boolean', 'Symbol', 'BigInt', 'Date', 'RegExp', 'Map', 'Set', 'WeakMap', 'WeakSet',
  'Promise', 'ArrayBuffer', 'SharedArrayBuffer', 'DataView', 'TypedArray', 'Int8Array', 'Uint8Array', 'Uint8ClampedArray', 'Int16Array',
  'Uint16Array', 'Int32Array', 'Uint32Array', 'Float32Array', 'Float64Array', 'BigInt64Array', 'BigUint64Array', 'Error', 'TypeError',
  'RangeError', 'SyntaxError', 'ReferenceError', 'EvalError', 'URIError', 'AggregateError', 'Math', 'JSON', 'Buffer', 'URL', 'URLSearchParams',
  'IteratorPrototype', 'AsyncIteratorPrototype', 'ArrayIterator', 'MapIterator', 'SetIterator', 'StringIterator', 'node:events', 'node:buffer.Buffer'
])
const PROTOTYPES = /^(GeneratorFunction|AsyncFunction|AsyncGeneratorFunction|node:[\w/]+(\.\w+)*)(\.prototype)+$/
const ASSERTION = /Assert|Expectation/
const { getOwnPropertyDescriptor, getPrototypeOf } = Reflect

// Whether the tested process may name an object that the verifier has, too: classes of plain values, and prototypes. What
// else it has is a handle: a test that calls a function with an argument, both from the package, runs no code by `eval`.
function harmless (name) {
  if (/^(Object|Function|Error)\.prototype\.\w+$/.test(name) || PROTOTYPES.test(name)) return true
  return NAMED.has(name.replace(/(\.prototype)+$/, '')) && name !== 'Function'
}

const trusting = {
  sends: harmless, named: () => true, counterpart () {}, giving () {}, got () {}, threw () {}, asked () {},
  gave: (object, key, value) => value, writes: () => true
}

class Policy {
  // `known`: place -> kinds, null while they are recorded. `file`: of the tests, whose lines are places.
  constructor (known, file) {
    this.known = known === null ? null : new Map(Object.entries(known))
    this.seen = new Map()
    this.file = file
    this.running = 0 // tests that have begun and not ended
    this.current = '' // what was wrong in the one that runs
    this.fatal = '' // what fails every test from here on: nobody can say whose it was
    this.modules = new Map() // path -> what stubs have loaded
    this.fixed = new WeakSet()
    const prepare = (_, sites) => sites
    this.sites = () => {
      const { prepareStackTrace, stackTraceLimit } = Error
      Error.prepareStackTrace = prepare
      Error.stackTraceLimit = 40
      try {
        return new Error().stack
      } finally {
        Error.prepareStackTrace = prepareStackTrace
        Error.stackTraceLimit = stackTraceLimit
      }
    }
  }

  violated (reason) {
    if (this.running === 1) this.current ||= reason
    else this.fatal ||= reason
    return reason
  }

  // The other process has left, or does not answer.
  ended (reason) {
    this.fatal ||= reason
    return reason
  }

  begin () {
    if (this.running > 0) this.fatal ||= this.current
    this.current = ''
    this.running++
  }

  // What was wrong in the test that ends, or nothing.
  finish () {
    const found = this.fatal || this.current
    this.running = Math.max(0, this.running - 1)
    if (this.running === 0) this.current = ''
    return found
  }

  sends () { return true } // what both have never crosses

  named (name) { return harmless(name) }

  // The module that a stub stands for.
  counterpart (value) {
    if (isModuleNamespaceObject(value)) {
      const key = Object.keys(value)[0]
      for (const module of this.modules.values()) if (key in module && Object.is(module[key], value[key])) return module
    }
    for (const [name, { exports }] of Object.entries(_cache)) {
      if (exports === value) return this.modules.get(relative(process.cwd(), name.replace(/\?.*/, '')))
    }
  }

  // Before an object goes out as a handle for the first time.
  giving (value) {
    if (typeof value === 'symbol') return
    const above = getPrototypeOf(value)
    const inner = isProxy(above) ? undefined : above?.constructor?.name
    if (typeof value === 'object' && REFUSED.has(inner)) throw new TypeError(`a ${inner} does not cross`)
    if (typeof value === 'function' && getOwnPropertyDescriptor(value, 'resolve') && getOwnPropertyDescriptor(value, 'cache')) throw new TypeError('`require` does not cross')
    if (isModuleNamespaceObject(value)) throw new TypeError('a module does not cross')
    if (typeof value === 'object' && Object.values(_cache).some(({ exports }) => exports === value)) throw new TypeError('a module does not cross')
  }

  // Before a request of the tested process is performed on an object of this one.
  asked (object, op) {
    if (!WRITES.has(op)) return
    if (typeof object !== 'object' || this.fixed.has(object) || getOwnPropertyDescriptor(object, 'constructor')) {
      throw new TypeError('this object of a test cannot be changed from outside')
    }
  }

  gave (object, key, value) {
    const reached = typeof key === 'string' && INHERITED.has(key)
    if ((reached || this.fixed.has(object)) && (typeof value === 'object' || typeof value === 'function') && value !== null) this.fixed.add(value)
    return value
  }

  threw (error) {
    const failed = typeof error === 'object' && error !== null && ASSERTION.test(`${error.name} ${getPrototypeOf(error)?.constructor?.name}`)
    if (failed) this.note('an assertion failed in a callback', 'f')
  }

  // Whether the tested process may change objects of the tests here, as the pristine library does. If not, a change fails
  // the test. `same`: whether there is none.
  writes (same) {
    const place = `written ${this.place()}`
    if (this.known === null) this.note(place, 'w')
    const allowed = this.known === null || (this.known.get(place) ?? '').includes('w')
    if (!allowed && !same()) this.violated('an argument is changed where the right library leaves it alone')
    return allowed
  }

  // A value has come from the tested process.
  got (membrane, wire, label) {
    const kind = label.endsWith('.constructor') && wire?.i !== undefined ? '' : kindOf(membrane, wire)
    this.note(`${label} ${this.place()}`, kind)
  }

  note (place, kind) {
    if (this.known === null) {
      if (this.seen.size < MOST) this.seen.set(place, union(this.seen.get(place) ?? '', kind))
      return
    }
    const allowed = this.known.get(place) ?? 'ao'
    for (const letter of kind) {
      if (!allowed.includes(letter)) {
        this.violated(`${place}: not of the kind that is expected here`)
        break
      }
    }
  }

  // Line and column of the test file from which the library is used.
  place () {
    const sites = this.sites()
    if (!Array.isArray(sites)) return ''
    for (const site of sites) {
      const name = site.getFileName()
      if (name !== null && name !== undefined && name.endsWith(this.file)) return `${site.getLineNumber()}:${site.getColumnNumber()}`
    }
    return ''
  }
}

function union (one, two) {
  return [...new Set(one + two)].sort().join('')
}

function kindOf (membrane, wire) {
  const letters = new Set()
  const visited = new Set()
  const pending = [wire]
  while (pending.length) {
    const next = pending.pop()
    if (next === null || typeof next !== 'object') continue
    if (Array.isArray(next)) pending.push(...next)
    else if (next.h !== undefined) letters.add(String(next.k)[0])
    else if (next.r !== undefined || (next.i !== undefined && !next.i.endsWith('prototype'))) letters.add('f') // may do as a matcher
    else if (next.c !== undefined && !visited.has(next.c)) {
      visited.add(next.c)
      const content = membrane.contents.get(next.c)
      if (content !== undefined && 'aomse'.includes(content.t)) pending.push(content.v, content.e)
    }
  }
  return [...letters].sort().join('')
}

module.exports = { Policy, trusting }
