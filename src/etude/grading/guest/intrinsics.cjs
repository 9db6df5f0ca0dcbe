// Objects that every process has of its own: what is Array here is Array there. They never cross, neither as a copy nor
// as a handle; so no handle leads to `Function`, `process` or `fs` of the other process. Below jest these modules and the
// tests have a realm of their own, and what Node makes has another: the objects of both have the same names.
'use strict'

const { builtinModules, createRequire } = require('node:module')

const load = createRequire('/')
const { ownKeys, getOwnPropertyDescriptor, getPrototypeOf } = Reflect
const LANGUAGE = [
  'Object', 'Function', 'Array', 'String', 'Number', 'Boolean', 'Symbol', 'BigInt', 'Date', 'RegExp', 'Map', 'Set', 'WeakMap', 'WeakSet',
  'WeakRef', 'FinalizationRegistry', 'Promise', 'Proxy', 'Reflect', 'Math', 'JSON', 'Intl', 'Atomics', 'WebAssembly', 'ArrayBuffer',
  'SharedArrayBuffer', 'DataView', 'Int8Array', 'Uint8Array', 'Uint8ClampedArray', 'Int16Array', 'Uint16Array', 'Int32Array', 'Uint32Array',
  'Float32Array', 'Float64Array', 'BigInt64Array', 'BigUint64Array', 'Error', 'TypeError', 'RangeError', 'SyntaxError', 'ReferenceError',
  'EvalError', 'URIError', 'AggregateError', 'eval', 'parseInt', 'parseFloat', 'isNaN', 'isFinite', 'encodeURIComponent', 'encodeURI',
  'decodeURIComponent', 'decodeURI', 'escape', 'unescape'
]
const HOST = [
  'globalThis', 'process', 'Buffer', 'console', 'performance', 'crypto', 'navigator', 'setTimeout', 'setInterval', 'setImmediate',
  'clearTimeout', 'clearInterval', 'clearImmediate', 'queueMicrotask', 'structuredClone', 'fetch', 'atob', 'btoa', 'URL', 'URLSearchParams',
  'TextEncoder', 'TextDecoder', 'AbortController', 'AbortSignal', 'Event', 'EventTarget', 'MessageChannel', 'MessagePort', 'MessageEvent',
  'BroadcastChannel', 'Blob', 'FormData', 'Headers', 'Request', 'Response', 'ReadableStream', 'WritableStream', 'TransformStream',
  'CompressionStream', 'DecompressionStream', 'DOMException'
]
const UNNAMED = `({
  GeneratorFunction: () => Object.getPrototypeOf(function * () {}).constructor,
  AsyncFunction: () => Object.getPrototypeOf(async function () {}).constructor,
  AsyncGeneratorFunction: () => Object.getPrototypeOf(async function * () {}).constructor,
  TypedArray: () => Object.getPrototypeOf(Int8Array),
  IteratorPrototype: () => Object.getPrototypeOf(Object.getPrototypeOf([][Symbol.iterator]())),
  AsyncIteratorPrototype: () => Object.getPrototypeOf(Object.getPrototypeOf(Object.getPrototypeOf((async function * () {})()))),
  ArrayIterator: () => Object.getPrototypeOf([][Symbol.iterator]()),
  MapIterator: () => Object.getPrototypeOf(new Map().entries()),
  SetIterator: () => Object.getPrototypeOf(new Set().values()),
  StringIterator: () => Object.getPrototypeOf(''[Symbol.iterator]())
})`
// Their methods touch nothing hidden in an object, so those of here do for objects of there.
const GENERIC = new Set(['Object', 'Function', 'Error'])
const names = new Map()
const objects = new Map()

function add (name, value) {
  if ((typeof value !== 'object' && typeof value !== 'function') || value === null || names.has(value)) return false
  names.set(value, name)
  if (!objects.has(name)) objects.set(name, value)
  return true
}

function members (name, value, inner = true) {
  for (const key of ownKeys(value)) {
    if (typeof key !== 'string' || key === 'prototype') continue
    const own = getOwnPropertyDescriptor(value, key)
    if (!('value' in own) || !add(`${name}.${key}`, own.value)) continue
    if (typeof own.value === 'function') prototype(`${name}.${key}`, own.value)
    if (inner) members(`${name}.${key}`, own.value, false)
  }
}

function prototype (name, value) {
  const own = getOwnPropertyDescriptor(value, 'prototype')
  if (own !== undefined && 'value' in own) add(`${name}.prototype`, own.value)
}

function realm (space, evaluate) {
  for (const [name, find] of Object.entries(evaluate(UNNAMED))) {
    const value = find()
    add(name, value)
    if (typeof value === 'function') {
      prototype(name, value)
      if (value.prototype && getPrototypeOf(value.prototype)) add(`${name}.prototype.prototype`, value.prototype.prototype)
    }
  }
  for (const name of LANGUAGE) {
    const value = space[name]
    if (!add(name, value)) continue
    if (typeof value === 'function') prototype(name, value)
    members(name, value, false)
    if (GENERIC.has(name)) members(`${name}.prototype`, value.prototype, false)
  }
  for (const name of HOST) {
    const own = getOwnPropertyDescriptor(space, name)
    // What is made at its first use is left alone, but for two that are always there.
    const value = own === undefined ? undefined : 'value' in own || name === 'process' || name === 'Buffer' ? space[name] : undefined
    if (!add(name, value)) continue
    if (typeof value === 'function') prototype(name, value)
    if (name !== 'globalThis') members(name, value, false)
  }
}

realm(globalThis, eval)
const { runInThisContext } = load('node:vm')
const outer = runInThisContext('globalThis')
if (outer !== globalThis) realm(outer, runInThisContext)

const PUBLIC = new Set(builtinModules.filter((name) => !name.startsWith('_')))
let seen = 0

// Modules of Node that were loaded since the last look.
function update () {
  const list = process.moduleLoadList
  for (; seen < list.length; seen++) {
    const name = list[seen].replace(/^NativeModule /, '')
    if (PUBLIC.has(name)) learn(name)
  }
}

function learn (name) {
  let value
  try {
    value = load(name)
  } catch {
    return
  }
  if (add(`node:${name}`, value) && typeof value === 'function') prototype(`node:${name}`, value)
  members(`node:${name}`, value)
}

// The name of such an object, undefined for others.
function intrinsicOf (value) {
  const name = names.get(value)
  if (name !== undefined) return name
  update()
  return names.get(value)
}

// The object of that name. Throws TypeError if there is none here.
function intrinsicAt (name) {
  if (!objects.has(name)) {
    const module = /^node:([\w/]+)/.exec(name)
    if (module !== null && PUBLIC.has(module[1])) learn(module[1])
  }
  if (!objects.has(name)) throw new TypeError(`no ${name} here`)
  return objects.get(name)
}

module.exports = { intrinsicAt, intrinsicOf }
