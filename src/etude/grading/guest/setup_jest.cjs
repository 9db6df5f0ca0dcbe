'use strict'

require('./remote.cjs').prepare({ beforeEach, afterEach, afterAll })
