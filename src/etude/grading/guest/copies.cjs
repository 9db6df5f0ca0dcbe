// Values that cross by copy: objects of plain types and exact classes. Anything else crosses as a handle.
'use strict'

const { Buffer } = require('node:buffer')
const { types } = require('node:util')

const { getPrototypeOf, ownKeys, getOwnPropertyDescriptor, defineProperty, deleteProperty } = Reflect
const ERRORS = { Error, TypeError, RangeError, SyntaxError, ReferenceError, EvalError, URIError }
const TYPED = {
  Int8Array, Uint8Array, Uint8ClampedArray, Int16Array, Uint16Array, Int32Array, Uint32Array, Float32Array, Float64Array,
  BigInt64Array, BigUint64Array
}
const classes = new Map([
  [Object.prototype, 'o'], [null, 'o'], [Array.prototype, 'a'], [Date.prototype, 'd'], [RegExp.prototype, 'r'],
  [Map.prototype, 'm'], [Set.prototype, 's'], [ArrayBuffer.prototype, 'A'], [Buffer.prototype, 'B'], [URL.prototype, 'U'],
  [URLSearchParams.prototype, 'Q'], [Number.prototype, 'p'], [String.prototype, 'p'], [Boolean.prototype, 'p'],
  ...Object.values(ERRORS).map((type) => [type.prototype, 'e']), ...Object.values(TYPED).map((type) => [type.prototype, 'T'])
])
const genuine = { // has the object what its prototype promises?
  a: Array.isArray, d: types.isDate, r: types.isRegExp, m: types.isMap, s: types.isSet, A: types.isArrayBuffer, B: types.isUint8Array,
  T: types.isTypedArray, e: types.isNativeError, p: types.isBoxedPrimitive
}
const held = { // own properties that are no content, by tag
  a: new Set(['length']), r: new Set(['lastIndex']), e: new Set(['stack', 'message'])
}
const none = new Set()

// The tag of a class whose objects cross by copy, null for any other object.
function copyable (value) {
  if (typeof value !== 'object' || types.isProxy(value)) return null
  const tag = classes.get(getPrototypeOf(value))
  if (tag === undefined || (genuine[tag] !== undefined && !genuine[tag](value))) return null
  if (tag === 'o' && (types.isNativeError(value) || types.isBoxedPrimitive(value) || types.isArgumentsObject(value) || types.isExternal(value))) return null
  return extras(value, tag) === null ? null : tag
}

// Own properties beyond those that the class keeps itself: [key, value, enumerable]; null if one is no plain value.
function extras (value, tag) {
  if (tag === 'B' || tag === 'T') return indexed(value)
  if (tag === 'U' || tag === 'Q') return []
  const skipped = held[tag] ?? none
  const frozen = !Object.isExtensible(value)
  const found = []
  for (const key of ownKeys(value)) {
    if (skipped.has(key) || (tag === 'p' && types.isStringObject(value) && (key === 'length' || /^\d+$/.test(String(key))))) continue
    const own = getOwnPropertyDescriptor(value, key)
    if (!('value' in own) || (!own.enumerable && tag !== 'e') || (!frozen && !(own.writable && own.configurable))) return null
    found.push([key, own.value, own.enumerable])
  }
  return found
}

function indexed (value) {
  return Object.keys(value).length === value.length ? [] : null
}

// What an object holds, as JSON; null if it has become something that does not cross by copy.
function contentOf (value, encode) {
  const tag = copyable(value)
  if (tag === null) return null
  const content = { t: tag }
  if (tag === 'o' && getPrototypeOf(value) === null) content.z = 1
  const rest = extras(value, tag)
  if (tag === 'a') {
    content.l = value.length
    content.v = []
    let index = 0
    while (index < rest.length && rest[index][0] === String(index)) content.v.push(encode(rest[index++][1]))
    rest.splice(0, index)
  }
  if (rest.length) content.e = rest.map(([key, inner, shown]) => [encode(key), encode(inner), shown ? 1 : 0])
  switch (tag) {
    case 'd': content.v = encode(Date.prototype.getTime.call(value)); break
    case 'r': content.v = [value.source, value.flags, value.lastIndex]; break
    case 'm': content.v = [...Map.prototype.entries.call(value)].map(([key, inner]) => [encode(key), encode(inner)]); break
    case 's': content.v = [...Set.prototype.values.call(value)].map(encode); break
    case 'A': content.v = Buffer.from(value).toString('base64'); break
    case 'B': content.v = value.toString('base64'); break
    case 'T':
      content.c = value.constructor.name
      content.v = Buffer.from(value.buffer, value.byteOffset, value.byteLength).toString('base64')
      break
    case 'U': content.v = value.href; break
    case 'Q': content.v = value.toString(); break
    case 'p': content.v = encode(value.valueOf()); break
    case 'e': {
      content.c = Object.keys(ERRORS).find((name) => ERRORS[name].prototype === getPrototypeOf(value))
      const message = getOwnPropertyDescriptor(value, 'message')
      if (message !== undefined) content.m = String(message.value)
      content.s = typeof value.stack === 'string' ? value.stack.slice(0, 4000) : ''
    }
  }
  if (Object.isFrozen(value) && tag !== 'T' && tag !== 'B') content.f = 1
  return content
}

// Whether two contents are the same, one from each end: a handle of one is a reference of the other. Names, and members of
// maps and sets, have no order.
function alike (one, other) {
  return other !== null && JSON.stringify(canonical(one)) === JSON.stringify(canonical(other))
}

function canonical (wire) {
  if (wire === null || typeof wire !== 'object') return wire
  if (Array.isArray(wire)) return wire.map(canonical)
  const reference = wire.h ?? wire.y
  if (reference !== undefined) return { r: reference }
  const sorted = (items) => items.map((item) => JSON.stringify(canonical(item))).sort()
  const made = Object.fromEntries(Object.entries(wire).map(([key, inner]) => [key, canonical(inner)]))
  if (Array.isArray(wire.e)) made.e = sorted(wire.e)
  if ('ms'.includes(wire.t) && Array.isArray(wire.v)) made.v = sorted(wire.v)
  return made
}

// A new object of the class that a content names. Its properties come with `fill`.
function make (content) {
  switch (content.t) {
    case 'o': return content.z ? Object.create(null) : {}
    case 'a': return []
    case 'd': return new Date(0)
    case 'r': return new RegExp(content.v[0], content.v[1])
    case 'm': return new Map()
    case 's': return new Set()
    case 'A': return new Uint8Array(Buffer.from(content.v, 'base64')).buffer
    case 'B': return Buffer.from(content.v, 'base64')
    case 'T': return new (of(TYPED, content.c))(new Uint8Array(Buffer.from(content.v, 'base64')).buffer)
    case 'U': return new URL(content.v)
    case 'Q': return new URLSearchParams(content.v)
    case 'p': return Object(typeof content.v === 'object' ? Number(content.v.n) : content.v)
    case 'e': return new (of(ERRORS, content.c))(content.m)
  }
  throw new TypeError('no plain object')
}

function of (classes, name) {
  if (!Object.hasOwn(classes, name)) throw new TypeError('no such class')
  return classes[name]
}

// Make an object hold what a content says.
function fill (value, content, decode) {
  if (Object.isFrozen(value)) return
  switch (content.t) {
    case 'a':
      value.length = content.v.length
      content.v.forEach((wire, index) => put(value, index, decode(wire), true))
      value.length = content.l
      break
    case 'd': value.setTime(decode(content.v)); break
    case 'r': value.lastIndex = content.v[2]; break
    case 'm':
      value.clear()
      for (const [key, inner] of content.v) value.set(decode(key), decode(inner))
      break
    case 's':
      value.clear()
      for (const inner of content.v) value.add(decode(inner))
      break
    case 'A': case 'B': case 'T': {
      const bytes = Buffer.from(content.v, 'base64')
      const there = content.t === 'A' ? Buffer.from(value) : Buffer.from(value.buffer, value.byteOffset, value.byteLength)
      if (bytes.length === there.length) bytes.copy(there)
      return
    }
    case 'U': value.href = content.v; return
    case 'Q': return
    case 'e':
      if (content.m !== undefined) put(value, 'message', content.m, false)
      put(value, 'stack', content.s, false)
  }
  const entries = (content.e ?? []).map(([key, inner, shown]) => [decode(key), decode(inner, key), shown === 1])
  const kept = held[content.t] ?? none
  const before = ownKeys(value).filter((key) => !kept.has(key) && !(content.t === 'a' && /^\d+$/.test(String(key)) && key < content.v.length))
  if (content.t !== 'p' && (before.length !== entries.length || before.some((key, index) => key !== entries[index][0]))) {
    for (const key of before) deleteProperty(value, key)
  }
  for (const [key, inner, shown] of entries) put(value, key, inner, shown)
  if (content.f) Object.freeze(value)
}

function put (object, key, value, enumerable) {
  defineProperty(object, key, { value, enumerable, writable: true, configurable: true })
}

module.exports = { alike, copyable, contentOf, fill, make }
