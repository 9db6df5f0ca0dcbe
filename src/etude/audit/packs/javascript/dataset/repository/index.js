'use strict'

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
