// Objects of another process: the verifier's tests use the modules of the tested process as if they were here.
//
// Two processes hold one end each of a socket and evaluate this file. Calls are synchronous on both ends, and calls may
// come in while one waits. Values of plain types travel by copy, and the copies on both ends are brought into line by
// every message. Everything else is a handle: a Proxy whose traps are requests. Promises settle on both ends.
//
// The tested end is not trusted. What the verifier's end does for it is limited in `policy.cjs`, and what it returns is
// checked against what the pristine library returned (`kinds.cjs`).
'use strict'

const { Channel } = require('./channel.cjs')
const { alike, copyable, contentOf, fill, make } = require('./copies.cjs')
const { intrinsicAt, intrinsicOf } = require('./intrinsics.cjs')

const LIVE = 400 // copies that are compared at every message; older ones when a message names them
const LARGE = 20_000 // characters of a content: such copies are compared only when a message names them
const HANDLES = 200_000
const { get, set, has, deleteProperty, ownKeys, getOwnPropertyDescriptor, defineProperty } = Reflect
const { getPrototypeOf, setPrototypeOf, apply, construct } = Reflect
const { stringify, parse } = JSON
const { setImmediate, queueMicrotask } = globalThis // as they are before a test replaces them
const symbols = new Map(ownKeys(Symbol).filter((name) => typeof Symbol[name] === 'symbol').map((name) => [name, Symbol[name]]))
const wellKnown = new Map([...symbols].map(([name, symbol]) => [symbol, name]))

class Membrane {
  // `first`: 0 or 1, so that ids of both ends differ. `policy`: what the other end may do, and what is said of values.
  // `keeps`: whether this process waits for the other's events, as for its own.
  constructor ({ fd, first, policy, load, deadline, gone, keeps }) {
    this.policy = policy
    this.load = load
    this.next = first // ids of this end are odd or even
    this.mine = new Map() // id -> object or symbol that the other end knows by a handle
    this.ids = new Map()
    this.theirs = new Map() // id -> proxy, promise or symbol
    this.proxies = new Map()
    this.copies = new Map() // id -> object on both ends
    this.copied = new Map() // object -> id
    this.live = new Set() // ids of copies that are compared
    this.states = new Map() // id -> content as both ends know it
    this.contents = new Map() // id -> content as it came
    this.pending = new Map() // id -> settle functions of a promise of the other end
    this.answers = new Map()
    this.asked = 0
    this.sent = 0
    this.received = 0
    this.depth = 0 // of questions that wait for an answer
    this.turn = 0 // of this end's loop, as far as the other end was asked in it
    this.turning = false
    this.over = 0 // the last turn of the other end that is over
    this.settled = 0 // the last turn of this end after which the other end has done what it had put off
    this.holding = false
    this.inside = 0 // of requests that are performed
    this.channel = new Channel(fd, deadline, (message) => this.accept(parse(message)), gone, keeps)
  }

  // Values

  encode (value) {
    switch (typeof value) {
      case 'string': case 'boolean': return value
      case 'number': return Number.isFinite(value) && !Object.is(value, -0) ? value : { n: Object.is(value, -0) ? '-0' : String(value) }
      case 'undefined': return { u: 1 }
      case 'bigint': return { b: String(value) }
      case 'symbol': return this.symbol(value)
    }
    if (value === null) return null
    let id = this.proxies.get(value)
    if (id !== undefined) return { r: id }
    const name = intrinsicOf(value)
    if (name !== undefined && this.policy.sends(name)) return { i: name }
    id = this.copied.get(value)
    if (id === undefined && this.ids.has(value)) return this.handle(value)
    if (id === undefined && copyable(value) !== null) this.share(id = this.fresh(), value)
    if (id === undefined) return this.stands(value) ?? this.handle(value)
    this.live.add(id)
    return { c: id }
  }

  // A module of this end that has only the values of one of the other end is that one.
  stands (value) {
    const other = this.policy.counterpart(value)
    if (other === undefined) return undefined
    const id = this.proxies.get(other)
    if (id !== undefined) this.proxies.set(value, id)
    return id === undefined ? this.encode(other) : { r: id }
  }

  symbol (value) {
    if (wellKnown.has(value)) return { s: wellKnown.get(value) }
    const key = Symbol.keyFor(value)
    if (key !== undefined) return { k: key }
    if (this.proxies.has(value)) return { r: this.proxies.get(value) }
    return { y: this.known(value), d: value.description ?? null }
  }

  fresh () {
    if (this.next > 2 * HANDLES) throw new RangeError('too many objects cross between test and library')
    this.next += 2
    return this.next
  }

  known (value) {
    let id = this.ids.get(value)
    if (id === undefined) {
      id = this.fresh()
      this.ids.set(value, id)
      this.mine.set(id, value)
    }
    return id
  }

  handle (value) {
    if (!this.ids.has(value)) this.policy.giving(value)
    const started = this.ids.has(value)
    const id = this.known(value)
    if (typeof value === 'function') return { h: id, k: 'f' }
    if (value instanceof Promise && getPrototypeOf(value) === Promise.prototype) {
      const settle = (ok) => (result) => this.tell({ p: id, ok, ...this.encoded(result) })
      if (!started) Promise.prototype.then.call(value, settle(true), settle(false))
      return { h: id, k: 'p' }
    }
    return { h: id, k: Array.isArray(value) ? 'a' : 'o' }
  }

  encoded (value) {
    try {
      return { v: this.encode(value) }
    } catch (error) {
      return { v: this.encode(new TypeError(`no value that can cross: ${error.message}`)), bad: 1 }
    }
  }

  share (id, object) {
    this.copies.set(id, object)
    this.copied.set(object, id)
    this.live.add(id)
  }

  decode (wire, label = '') {
    if (wire === null || typeof wire !== 'object') return wire
    if (wire.u) return undefined
    if (wire.n !== undefined) return wire.n === '-0' ? -0 : Number(wire.n)
    if (wire.b !== undefined) return BigInt(wire.b)
    if (wire.s !== undefined) return this.there(symbols, wire.s)
    if (wire.k !== undefined && wire.h === undefined) return Symbol.for(wire.k)
    if (wire.i !== undefined && this.policy.named(wire.i)) return intrinsicAt(wire.i)
    if (wire.c !== undefined) return this.there(this.copies, wire.c)
    if (wire.r !== undefined) return this.there(this.mine, wire.r)
    if (wire.y !== undefined) return this.theirs.get(wire.y) ?? this.meet(wire.y, Symbol(wire.d ?? undefined))
    if (wire.h !== undefined) return this.theirs.get(wire.h) ?? this.meet(wire.h, this.counterpart(wire.h, wire.k, label))
    throw new TypeError(`no value: ${stringify(wire).slice(0, 80)}`)
  }

  there (table, id) {
    if (!table.has(id)) throw new TypeError('no such object')
    return table.get(id)
  }

  meet (id, value) {
    if (!Number.isSafeInteger(id) || id % 2 === this.next % 2 || this.theirs.size > HANDLES) throw new TypeError('no handle')
    this.theirs.set(id, value)
    this.proxies.set(value, id)
    return value
  }

  counterpart (id, kind, label) {
    if (kind === 'p') {
      const promise = new Promise((resolve, reject) => this.pending.set(id, { resolve, reject, label }))
      return promise
    }
    const target = kind === 'f' ? bare() : kind === 'a' ? [] : {}
    return new Proxy(target, this.traps(id, label, kind))
  }

  // Messages

  // Copies that changed since both ends agreed, those that they hold among them.
  changed () {
    const nodes = []
    for (const id of this.live) {
      const content = contentOf(this.copies.get(id), (value) => this.encode(value))
      if (content === null) continue
      const text = stringify(content)
      if (text.length > LARGE) this.live.delete(id)
      if (text === this.states.get(id)) continue
      this.states.set(id, text)
      nodes.push([id, content])
    }
    for (const id of this.live) {
      if (this.live.size <= LIVE) break
      this.live.delete(id)
    }
    return nodes
  }

  tell (message) {
    const nodes = this.changed()
    if (nodes.length) message.o = nodes
    this.sent++
    this.channel.send(stringify(message))
  }

  take (nodes) {
    if (nodes === undefined) return
    for (const [id, content] of nodes) {
      if (this.copies.has(id)) continue
      if (!Number.isSafeInteger(id) || id % 2 === this.next % 2 || this.copies.size > HANDLES) throw new TypeError('no copy')
      this.share(id, make(content))
    }
    const taken = nodes.filter(([id, content]) => this.takes(id, content))
    for (const [id, content] of taken) {
      this.contents.set(id, content)
      this.policy.got(this, { c: id }, 'copies')
      fill(this.copies.get(id), content, (wire, key) => this.decode(wire, typeof key === 'string' ? key.slice(-80) : 'copies'))
    }
    for (const [id] of taken) {
      const content = contentOf(this.copies.get(id), (value) => this.encode(value))
      if (content !== null) this.states.set(id, stringify(content))
    }
  }

  // Whether the other end may change the object. If not it stays as it is, and the other end hears of that.
  takes (id, content) {
    const same = () => alike(content, contentOf(this.copies.get(id), (value) => this.encode(value)))
    if (id % 2 !== this.next % 2 || this.policy.writes(same)) return true
    this.states.delete(id)
    this.live.add(id)
    return false
  }

  ask (message, label) {
    const id = message.q = ++this.asked
    const turn = this.begun()
    if (turn !== undefined) message.t = turn
    this.tell(message)
    this.depth++
    try {
      while (!this.answers.has(id)) this.accept(parse(this.channel.wait()))
    } finally {
      this.depth--
    }
    const answer = this.answers.get(id)
    this.answers.delete(id)
    this.policy.got(this, answer.v, answer.e ? `${label}!` : label)
    const value = this.decode(answer.v, label)
    if (answer.e) throw value
    return value
  }

  // One thread of calls runs through both ends: while one end is busy, the loop of the other stands still. When all calls
  // of a turn have returned, what the other end has put off to the end of its own turn (promises, ticks) comes first.
  begun () {
    if (this.inside > 0 || this.depth > 0) return undefined
    if (!this.turning) {
      this.turning = true
      this.turn++
      queueMicrotask(() => this.yield())
    }
    return this.turn
  }

  yield () {
    this.turning = false
    if (this.channel.lost) return
    this.tell({ y: this.turn })
    this.depth++
    try {
      while (this.settled < this.turn) this.accept(parse(this.channel.wait()))
    } catch (error) {
      if (!this.channel.ended()) throw error
    } finally {
      this.depth--
    }
  }

  // After an answer from the loop: perform what is asked in the same turn.
  hold (turn) {
    if (turn === undefined || this.holding || this.depth > 0) return
    this.holding = true
    try {
      while (this.over < turn) this.accept(parse(this.channel.wait()))
    } catch (error) {
      if (!this.channel.ended()) throw error
    } finally {
      this.holding = false
    }
  }

  // The other end's turn is over.
  yielded (turn) {
    this.over = turn
    const settle = () => { if (!this.channel.lost) this.tell({ w: turn }) }
    if (this.depth > 0) settle()
    else setImmediate(settle)
  }

  accept (message) {
    this.received++
    this.take(message.o)
    if (message.q !== undefined) this.answer(message)
    else if (message.a !== undefined) this.answers.set(message.a, message)
    else if (message.p !== undefined) this.settle(message)
    else if (message.y !== undefined) this.yielded(message.y)
    else if (message.w !== undefined) this.settled = message.w
    else if (message.z !== undefined) this.channel.rest(message.z === this.sent)
    else if (message.x !== undefined) this.uncaught(message)
    else throw new TypeError('no message')
  }

  // The loop of this process has nothing to do: the other end need not wait for it any more.
  idle () {
    this.channel.send(stringify({ z: this.received }))
    this.channel.rest(false)
  }

  settle ({ p, ok, v }) {
    const { resolve, reject, label } = this.there(this.pending, p)
    this.pending.delete(p)
    this.policy.got(this, v, `await ${label}`)
    const value = this.decode(v, `await ${label}`)
    // A thenable is what the other end's promise had resolved to: never, since it would have been taken apart there.
    if (ok) resolve(value)
    else reject(value)
  }

  uncaught (message) {
    const error = this.decode(message.v, 'uncaught')
    setImmediate(() => { throw error })
  }

  answer (message) {
    const reply = (value, thrown) => {
      if (thrown) this.policy.threw(value)
      const answer = this.encoded(value)
      this.tell({ a: message.q, v: answer.v, ...(thrown || answer.bad ? { e: 1 } : {}) })
      this.hold(message.t)
    }
    let value
    try {
      if (message.op === 'load') {
        value = this.load(message.path, message.module, this.depth > 0)
        if (message.module) {
          value.then((loaded) => reply(loaded, false), (error) => reply(error, true))
          return
        }
      } else {
        this.inside++
        try {
          value = this.perform(message)
        } finally {
          this.inside--
        }
      }
    } catch (error) {
      reply(error, true)
      return
    }
    reply(value, false)
  }

  perform ({ op, id, key, value, self, args, target }) {
    const object = this.there(this.mine, id)
    this.policy.asked(object, op, key)
    const name = key === undefined ? undefined : this.decode(key)
    switch (op) {
      case 'get': return this.policy.gave(object, name, get(object, name, self === undefined ? object : this.decode(self)))
      case 'set': return set(object, name, this.decode(value), self === undefined ? object : this.decode(self))
      case 'has': return has(object, name)
      case 'delete': return deleteProperty(object, name)
      case 'keys': return ownKeys(object)
      case 'proto': return this.policy.gave(object, '__proto__', getPrototypeOf(object))
      case 'inherit': return setPrototypeOf(object, this.decode(value))
      case 'own': return this.described(object, name)
      case 'define': return defineProperty(object, name, this.decode(value))
      case 'apply': return apply(object, this.passed(object, [self], 'this of ')[0], this.passed(object, args))
      case 'construct': return construct(object, this.passed(object, args), target === undefined ? object : this.decode(target))
    }
    throw new TypeError('no such request')
  }

  described (object, name) {
    const found = getOwnPropertyDescriptor(object, name)
    if (found === undefined) return undefined
    if ('value' in found) this.policy.gave(object, name, found.value)
    return found
  }

  passed (callee, args, of = '') {
    const label = `${of}callback ${typeof callee.name === 'string' ? callee.name : ''}`
    return args.map((wire, index) => {
      this.policy.got(this, wire, `${label} ${index}`)
      return this.decode(wire, `${label} ${index}`)
    })
  }

  // What stands for an object of the other end

  traps (id, label, kind) {
    const named = (key) => `${label}.${typeof key === 'symbol' ? String(key) : key}`.slice(-160)
    const self = (receiver) => this.proxies.get(receiver) === id ? {} : { self: this.encode(receiver) }
    const ask = (op, more, name) => this.ask({ op, id, ...more }, name ?? label)
    return {
      get: (_, key, receiver) => ask('get', { key: this.encode(key), ...self(receiver) }, named(key)),
      set: (_, key, value, receiver) => {
        if (this.proxies.get(receiver) === id) return ask('set', { key: this.encode(key), value: this.encode(value) })
        // An object of this end inherits from the other's (OrdinarySetWithOwnDescriptor of ECMA-262).
        const found = ask('own', { key: this.encode(key) }, named(key))
        const parent = found === undefined ? ask('proto', {}, named('__proto__')) : null
        if (parent !== null) return set(parent, key, value, receiver)
        if (found !== undefined && !('value' in found)) return found.set !== undefined && (apply(found.set, receiver, [value]), true)
        const own = getOwnPropertyDescriptor(receiver, key)
        return defineProperty(receiver, key, own === undefined ? { value, writable: true, enumerable: true, configurable: true } : { value })
      },
      has: (_, key) => ask('has', { key: this.encode(key) }),
      deleteProperty: (_, key) => ask('delete', { key: this.encode(key) }),
      ownKeys: () => ask('keys', {}, `${label}.keys`),
      getPrototypeOf: () => ask('proto', {}, named('__proto__')),
      setPrototypeOf: (_, value) => ask('inherit', { value: this.encode(value) }),
      preventExtensions: () => false,
      getOwnPropertyDescriptor: (_, key) => {
        const found = ask('own', { key: this.encode(key) }, named(key))
        if (found !== undefined) found.configurable = kind !== 'a' || key !== 'length' // as the Proxy's target has it
        return found
      },
      defineProperty: (_, key, value) => ask('define', { key: this.encode(key), value: this.encode(value) }),
      apply: (_, receiver, args) => ask('apply', { self: this.encode(receiver), args: args.map((value) => this.encode(value)) }, `${label}()`.slice(-160)),
      construct: (_, args, target) => ask('construct', {
        args: args.map((value) => this.encode(value)), ...(this.proxies.get(target) === id ? {} : { target: this.encode(target) })
      }, `new ${label}`.slice(-160))
    }
  }
}

// A function that can be called and constructed and has no property of its own, so that a Proxy of it may say anything.
function bare () {
  const target = function () {}.bind()
  delete target.name
  delete target.length
  return target
}

module.exports = { Membrane }
