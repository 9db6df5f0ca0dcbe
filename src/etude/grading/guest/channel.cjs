// Messages on a socket, for a thread that has to wait for them without its event loop.
//
// A worker reads them. The main thread takes them from the worker's port as events, or waits on shared memory.
'use strict'

const { Buffer } = require('node:buffer')
const { writeSync } = require('node:fs')
const { MessageChannel, Worker, receiveMessageOnPort } = require('node:worker_threads')

const { now } = Date
const pause = new Int32Array(new SharedArrayBuffer(4))
const MOST = 64 << 20 // bytes of a message
const READER = `
const { Socket } = require('node:net')
const { workerData: { fd, flag, port, most } } = require('node:worker_threads')
const said = new Int32Array(flag)
function say (message) { port.postMessage(message); Atomics.add(said, 0, 1); Atomics.notify(said, 0) }
let parts = []
let held = 0
const socket = new Socket({ fd, readable: true, writable: false })
socket.on('data', (part) => {
  parts.push(part)
  held += part.length
  while (held >= 4) {
    if (parts[0].length < 4) parts = [Buffer.concat(parts)]
    const size = parts[0].readUInt32LE()
    if (size > most) return socket.destroy()
    if (held < 4 + size) return
    if (parts.length > 1) parts = [Buffer.concat(parts)]
    say(parts[0].toString('utf8', 4, 4 + size))
    parts = [parts[0].subarray(4 + size)]
    held -= 4 + size
  }
})
socket.on('error', () => {})
socket.on('close', () => say(null))
`

class Channel {
  // `accept` takes messages that nobody waits for; `gone` is called once when the other end has left.
  constructor (fd, deadline, accept, gone, keeps) {
    this.fd = fd
    this.keeps = keeps
    this.deadline = deadline
    this.gone = gone
    this.lost = false
    const flag = new SharedArrayBuffer(4)
    this.said = new Int32Array(flag)
    const { port1, port2 } = new MessageChannel()
    this.port = port1
    const workerData = { fd, flag, port: port2, most: MOST }
    this.worker = new Worker(READER, { eval: true, workerData, transferList: [port2], execArgv: [], env: {} })
    this.worker.unref()
    this.port.on('message', (message) => {
      if (!keeps) this.rest(true)
      if (this.hear(message)) accept(message)
    })
    this.rest(true)
  }

  // Whether the process may end although the other end could still say something.
  rest (may) {
    if (may) this.port.unref()
    else this.port.ref()
  }

  hear (message) {
    if (message !== null) return true
    this.rest(true)
    if (!this.lost) {
      this.lost = true
      this.gone('the tested process has ended')
    }
    return false
  }

  send (text) {
    if (this.lost) throw new Error(this.gone('the tested process has ended'))
    const data = Buffer.from(text)
    const head = Buffer.alloc(4)
    head.writeUInt32LE(data.length)
    const frame = Buffer.concat([head, data])
    if (this.keeps) this.rest(false)
    let done = 0
    try {
      while (done < frame.length) done += this.write(frame, done)
    } catch {
      throw new Error(this.gone('the tested process has ended'))
    }
  }

  // Whether nothing is to be expected any more.
  ended () {
    return this.lost || now() >= this.deadline
  }

  write (frame, done) {
    try {
      return writeSync(this.fd, frame, done)
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error
      Atomics.wait(pause, 0, 0, 1) // the other end reads in a thread of its own
      return 0
    }
  }

  // The next message. Throws once the other end has left, or at the deadline.
  wait () {
    for (;;) {
      const seen = Atomics.load(this.said, 0)
      const found = receiveMessageOnPort(this.port)
      if (found !== undefined) {
        if (this.hear(found.message)) return found.message
        throw new Error(this.gone('the tested process has ended'))
      }
      if (this.lost) throw new Error(this.gone('the tested process has ended'))
      const left = this.deadline - now()
      if (left <= 0) throw new Error(this.gone('no answer from the tested process'))
      Atomics.wait(this.said, 0, seen, left === Infinity ? undefined : left)
    }
  }
}

module.exports = { Channel }
