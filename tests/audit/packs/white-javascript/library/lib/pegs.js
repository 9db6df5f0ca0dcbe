/** A place on a board. */
export class Peg {
  constructor (row, column) {
    this.row = row
    this.column = column
  }

  /** The place so many rows and columns away. */
  moved (rows, columns) {
    const row = this.row + rows
    const column = this.column + columns
    return new Peg(row, column)
  }

  /** Whether both are one place. */
  equals (other) {
    return this.row === other.row && this.column === other.column
  }
}

/** Each item so many times. */
export function repeated (items, count) {
  const out = []
  for (const item of items) {
    for (let n = 0; n < count; n++) out.push(item)
  }
  return out
}

/** Items by what a function says of them. */
export function grouped (items, key) {
  const groups = new Map()
  for (const item of items) {
    const name = key(item)
    groups.set(name, [...groups.get(name) ?? [], item])
  }
  return groups
}

/** Tell listeners of every item, and resolve with their number. */
export async function told (emitter, items) {
  let count = 0
  for (const item of items) {
    emitter.emit('item', item)
    count++
  }
  return count
}

/** The entries of an object whose values are numbers. */
export function numeric (object) {
  const out = {}
  for (const [key, value] of Object.entries(object)) {
    if (typeof value === 'number') out[key] = value
  }
  return out
}

/** Sum of the numbers of a text. */
export function sum (text) {
  const found = text.match(/-?\d+/g)
  if (found === null) throw new RangeError(`no number in ${text}`)
  return found.map(Number).reduce((a, b) => a + b, 0)
}
