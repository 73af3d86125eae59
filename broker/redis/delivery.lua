-- Every atomic move of the Redis backend; broker/delivery/state.py is the reference for what each one does.
--
-- KEYS[1]  PREFIX..'state', where PREFIX is slipstream:{RUN}:STORE: (broker/redis/keys.py documents every key). All other
--          keys are derived from PREFIX and share its hash tag, so they lie in one slot.
-- ARGV[1]  the move; ARGV[2] the highest epoch that the caller was ever told; the rest is named at each move.
-- reply    {epoch, code, ...}; code: 'ok', 'refused' (then why), 'absent', 'lost'.
--
-- Time is the server's (TIME), in milliseconds. A move may be repeated: leases are found again by the caller's nonce,
-- groups by their token. `epoch` counts the moves of the learner. A caller that was told a higher one than is stored has
-- proof that acknowledged moves are gone (a failover to a lagging replica, an unsynced tail): the store is lost then.
-- Hot moves come first and return before the functions of rare ones are made. Works on Redis 6.2 and 7.

if redis.replicate_commands then redis.replicate_commands() end -- Redis 6.2: TIME before writes
local call, floor = redis.call, math.floor
local state_key, op = KEYS[1], ARGV[1]
local base = string.sub(state_key, 1, -6)
local tasks_key, pending_key, leases_key, ready_key = base .. 'tasks', base .. 'pending', base .. 'leases', base .. 'ready'
local clock = call('TIME')
local now = clock[1] * 1000 + floor(clock[2] / 1000)

-- Fields of a record in `tasks`, a MessagePack array.
local ATTEMPTS, FAILURES, NODES, REASON, STATE, TOKEN = 1, 2, 3, 4, 5, 6
local META, PAYLOAD, BYTES, STEP, FILTERED, LEASED_AT = 7, 8, 9, 10, 11, 12
local FAILED_BY, OTHERS_FAILED = 13, 14 -- the first node that failed it; 1 when another one did too
local REMEMBERED_TOKENS, EVENTS_KEPT, WAKE_MS, FORGET_MS, MOST = 8192, 4096, 60000, 600000, 500
local MOST_NODES, MOST_NODES_NAMED = 16384, 64
local ALONE = 4 -- times max_attempts: so often one node must fail a task to kill it while others work

local function text(number) return string.format('%.0f', number) end

-- create: KEYS[2] the run's pointer; ARGV 3 the pointer as the keeper read it ('' for none), 4 the new pointer,
-- 5.. fields and values of `state`. Also for a store that exists: then the fields are replaced and nothing else.
if op == 'create' then
  local pointer = call('GET', KEYS[2]) or ''
  if pointer ~= ARGV[3] and pointer ~= ARGV[4] then return {0, 'refused', 'another keeper took the run just now'} end
  call('DEL', base .. 'wake:') -- so that it goes on with a run where memory is full: see below
  call('SET', KEYS[2], ARGV[4])
  if call('EXISTS', state_key) == 0 then
    call('HSET', state_key, 'epoch', 0, 'committed', -1, 'next', 0, 'first_step', 0, 'wanted', 0, 'bytes', 0,
      'acc_groups', 0, 'acc_bytes', 0, 'tick', text(now), 'due', text(now))
  end
  for i = 5, #ARGV, 2 do call('HSET', state_key, ARGV[i], ARGV[i + 1]) end
  return {tonumber(call('HGET', state_key, 'epoch')), 'ok'}
end

local names = {'epoch', 'b', 'k', 'max_attempts', 'lease_ms', 'max_lease_ms', 'max_bytes', 'first_step', 'wanted', 'bytes',
  'acc_groups', 'acc_bytes', 'tick', 'taker_needs', 'committed', 'next', 'retain', 'due', 'passed_gone'}
local values = call('HMGET', state_key, 'store', 'lost', 'taker', unpack(names))
if not values[1] then return {0, 'absent'} end
local st = {taker = values[3]}
for i, name in ipairs(names) do st[name] = tonumber(values[i + 3]) end
if values[2] then return {st.epoch, 'lost', values[2]} end
if tonumber(ARGV[2]) > st.epoch then
  local why = 'epoch ' .. st.epoch .. ' where ' .. ARGV[2] .. ' was acknowledged'
  call('HSET', state_key, 'lost', why)
  return {st.epoch, 'lost', why}
end
st.passed_gone = st.passed_gone or 0
if st.wanted < st.b then st.wanted = st.b end

local dirty, stirred, ripened = {}, false, false -- fields to write; a task may now be leased; a take may now succeed
local function set(name, value)
  st[name] = value
  dirty[#dirty + 1] = name
  dirty[#dirty + 1] = type(value) == 'number' and text(value) or value
end
local function due(at) if at < st.due then set('due', at) end end -- when a lease or a node may next pass its deadline
local function count(name, by) if by ~= 0 then call('HINCRBY', state_key, name, text(by)) end end
local function event(kind, detail)
  local id = text(call('HINCRBY', state_key, 'events', 1)) .. '-0'
  call('XADD', base .. 'events', 'MAXLEN', '~', EVENTS_KEPT, id, 't', string.format('%.3f', now / 1000), 'k', kind,
    'd', cjson.encode(detail))
end
local function record(serial)
  local packed = call('HGET', tasks_key, serial)
  return packed and cmsgpack.unpack(packed)
end
local function save(serial, r) call('HSET', tasks_key, serial, cmsgpack.pack(r)) end
local function serial_of(token) return string.match(token, '^(%d+)%.') end
local function leased_record(token, node)
  local serial = serial_of(token)
  local r = serial and record(serial)
  local current = r and r[STATE] == 'leased' and r[TOKEN] == token and r[NODES][#r[NODES]] == node
  return serial, r, current
end
local function accepted(r, token, node)
  if r and r[STATE] ~= 'leased' and r[TOKEN] == token and r[NODES][#r[NODES]] == node then return true end
  return call('ZSCORE', base .. 'remembered', token .. '|' .. node) and true or false
end
local function seen(node) -- whether the node is known; its time is exact to a fiftieth of the lease time
  local at = call('ZSCORE', base .. 'seen', node)
  if at then
    if now - at > st.lease_ms / 50 then call('ZADD', base .. 'seen', text(now), node) end
    return true
  end
  if call('ZREM', base .. 'gone', node) == 0 then return false end
  call('ZADD', base .. 'seen', text(now), node)
  due(now + st.lease_ms)
  event('node_back', {node = node})
  return true
end
local function requeue(serial, r)
  r[STATE], r[TOKEN] = 'pending', ''
  call('ZADD', pending_key, serial, serial)
  save(serial, r)
  stirred = true
end
local function ledger_line(serial, r, finished)
  local meta = r[META] ~= '' and cjson.decode(r[META]) or {}
  local line = cmsgpack.pack({tonumber(serial), finished, r[ATTEMPTS], r[NODES], r[STEP], meta.version_min or '',
    meta.version_max or '', type(meta.reward_mean) == 'number' and meta.reward_mean or '', r[REASON], r[FILTERED]})
  return struct.pack('>I4', #line) .. line
end
local NOT_WORKING = {quarantined = true, draining = true}
local function others_may_succeed(node) -- whether a node besides this one lives and may be given tasks
  for _, other in ipairs(call('ZRANGE', base .. 'seen', 0, -1)) do
    local f = other ~= node and call('HMGET', base .. 'node:' .. other, 'version', 'report')
    if f and f[1] and f[2] and tonumber(f[1]) >= 0 and not NOT_WORKING[cjson.decode(f[2]).state] then return true end
  end
  return false
end
local function lose(serial, r, why)
  local node = r[NODES][#r[NODES]]
  call('ZREM', leases_key, r[TOKEN])
  r[FAILURES], r[REASON] = r[FAILURES] + 1, why
  if (r[FAILED_BY] or '') == '' then r[FAILED_BY], r[OTHERS_FAILED] = node, 0 end
  if r[FAILED_BY] ~= node then r[OTHERS_FAILED] = 1 end
  if r[FAILURES] < st.max_attempts then return requeue(serial, r) end
  local alone = r[OTHERS_FAILED] == 0 and r[FAILURES] < ALONE * st.max_attempts
  if alone and others_may_succeed(node) then return requeue(serial, r) end
  call('HDEL', tasks_key, serial)
  call('HDEL', base .. 'bodies', serial)
  call('ZADD', base .. 'passed', serial, serial)
  call('APPEND', base .. 'ledger', ledger_line(serial, r, 'dead'))
  count('dead', 1)
  event('task_dead', {serial = tonumber(serial), attempts = r[ATTEMPTS], reason = why})
  stirred, ripened = true, true
end
local function waste(node, reason, tokens, seconds) -- under the node, or in the totals when it is gone
  local key = base .. 'node:' .. node
  if call('EXISTS', key) == 0 then key = state_key end
  if tokens > 0 then call('HINCRBY', key, 'wt:' .. reason, text(tokens)) end
  if seconds > 0 then call('HINCRBYFLOAT', key, 'ws:' .. reason, string.format('%.6f', seconds)) end
end
local function take_back(serial, r, why, kind)
  count('expiries', 1)
  waste(r[NODES][#r[NODES]], 'lost', 0, (now - r[LEASED_AT]) / 1000)
  event(kind or 'lease_expired', {serial = tonumber(serial), node = r[NODES][#r[NODES]], attempt = r[ATTEMPTS]})
  lose(serial, r, why)
end
local REASONS = {'lost', 'failed', 'filtered', 'regenerated', 'masked', 'cancelled', 'stalled', 'waiting'}
local function end_process(node) -- of a node: what it reported is counted
  local key = base .. 'node:' .. node
  local f = call('HMGET', key, 'report', 'handed')
  local report = cjson.decode(f[1])
  count('past_generated', math.max(report.tokens_generated or 0, tonumber(f[2]) or 0))
  local spent = report.waste or {}
  if not next(spent) and (report.tokens_wasted or 0) > 0 then spent = {cancelled = {tokens = report.tokens_wasted}} end
  for _, reason in ipairs(REASONS) do
    if spent[reason] then waste(node, reason, spent[reason].tokens or 0, spent[reason].seconds or 0) end
  end
  call('HDEL', key, 'report', 'handed', 'leased')
end
local function forget(node) -- its totals stay
  local key = base .. 'node:' .. node
  end_process(node)
  for _, reason in ipairs(REASONS) do
    local f = call('HMGET', key, 'wt:' .. reason, 'ws:' .. reason)
    if f[1] then call('HINCRBY', state_key, 'wt:' .. reason, f[1]) end
    if f[2] then call('HINCRBYFLOAT', state_key, 'ws:' .. reason, f[2]) end
  end
  call('DEL', key)
  call('ZREM', base .. 'seen', node)
  call('ZREM', base .. 'gone', node)
end

-- Where memory is full, Redis refuses commands that need some until a script has written. What leads to a commit, which
-- frees memory, must go on all the same: payloads are there before their `complete`. New tasks and leases wait.
if op ~= 'lease' and op ~= 'offer' then call('DEL', base .. 'wake:') end

-- Time. When nobody could call for long, or the server's clock jumped, everyone gets a new deadline.
local idle, long = now - st.tick, math.max(5000, st.lease_ms / 4)
if idle > long or idle < -long then
  for _, token in ipairs(call('ZRANGE', leases_key, 0, -1)) do
    call('ZADD', leases_key, text(now + math.min(st.lease_ms, st.max_lease_ms)), token)
    local serial = serial_of(token)
    local r = record(serial)
    r[LEASED_AT] = r[LEASED_AT] + idle -- or a jump would count as time for which the lease was held
    save(serial, r)
  end
  for _, node in ipairs(call('ZRANGE', base .. 'seen', 0, -1)) do call('ZADD', base .. 'seen', text(now), node) end
  set('due', now) -- the clock may have gone back
end
if idle > 1000 or idle < 0 then
  set('tick', now)
  call('ZREMRANGEBYSCORE', base .. 'waiting', '-inf', now)
  local forgotten = now - math.max(FORGET_MS, 10 * st.lease_ms)
  for _, node in ipairs(call('ZRANGEBYSCORE', base .. 'gone', '-inf', forgotten)) do forget(node) end
end
local function sweep()
  for _, token in ipairs(call('ZRANGEBYSCORE', leases_key, '-inf', text(now))) do
    local serial = serial_of(token)
    local r = record(serial)
    local node = r[NODES][#r[NODES]]
    if now >= r[LEASED_AT] + st.max_lease_ms then -- the bound, not the silence, ended it
      local held = string.format('node %s held the lease for %g s (broker.max_lease_s)', node, st.max_lease_ms / 1000)
      take_back(serial, r, held .. ' and did not finish', 'lease_overdue')
    else
      take_back(serial, r, 'lease of node ' .. node .. ' expired')
    end
  end
  for _, node in ipairs(call('ZRANGEBYSCORE', base .. 'seen', '-inf', text(now - st.lease_ms))) do
    call('ZADD', base .. 'gone', call('ZSCORE', base .. 'seen', node), node)
    call('ZREM', base .. 'seen', node)
    event('node_lost', {node = node, silent_s = st.lease_ms / 1000})
  end
  local lease = tonumber(call('ZRANGE', leases_key, 0, 0, 'WITHSCORES')[2]) or math.huge
  local node = tonumber(call('ZRANGE', base .. 'seen', 0, 0, 'WITHSCORES')[2]) or math.huge
  set('due', math.min(lease, node + st.lease_ms, now + FORGET_MS))
end
if now >= st.due then sweep() end

-- Admission: broker/delivery/admission.py and common/staleness.py. `more` tasks are being leased besides the stored ones.
local leased_now
local function admits(serial, version, more)
  if version < 0 then return false end
  serial = tonumber(serial)
  local passed = st.passed_gone + call('ZCOUNT', base .. 'passed', '-inf', '(' .. text(serial))
  if floor((serial - passed) / st.b) - (version - st.first_step) > st.k then return false end
  leased_now = leased_now or call('ZCARD', leases_key)
  if st.bytes + (leased_now + more) * st.acc_bytes / math.max(1, st.acc_groups) <= st.max_bytes then return true end
  local older = call('ZCOUNT', ready_key, '-inf', '(' .. text(serial)) + more
  for _, token in ipairs(call('ZRANGE', leases_key, 0, -1)) do
    if tonumber(serial_of(token)) < serial then older = older + 1 end
  end
  return older < st.wanted
end
local function wake(nonce)
  call('LPUSH', base .. 'wake:' .. nonce, 1)
  call('PEXPIRE', base .. 'wake:' .. nonce, WAKE_MS)
end
local function wake_nodes() -- as many waiting lease requests as there are pending tasks, each where it may lease one
  local waiting = call('ZRANGEBYSCORE', base .. 'waiting', text(now), '+inf')
  if #waiting == 0 then return end
  leased_now = nil
  local left, oldest, known = call('ZCARD', pending_key), call('ZRANGE', pending_key, 0, 0)[1], {}
  for _, waiter in ipairs(waiting) do
    if left == 0 then return end
    local nonce, node = string.match(waiter, '^(%x+):(.*)$')
    local version = tonumber(call('HGET', base .. 'node:' .. node, 'version')) or -1
    if known[version] == nil then known[version] = admits(oldest, version, 0) end
    if known[version] then
      call('ZREM', base .. 'waiting', waiter)
      wake(nonce)
      left = left - 1
    end
  end
end
local function finish(...)
  if stirred then wake_nodes() end
  if (ripened or stirred) and st.taker and st.taker ~= '' and call('ZCARD', ready_key) >= (st.taker_needs or 1) then
    wake(st.taker)
    set('taker', '')
  end
  if #dirty > 0 then call('HSET', state_key, unpack(dirty)) end
  return {st.epoch, 'ok', ...}
end
local function refuse(why)
  if stirred then wake_nodes() end
  if #dirty > 0 then call('HSET', state_key, unpack(dirty)) end
  return {st.epoch, 'refused', why}
end

-- Long lists go to Redis in pieces: Lua's stack holds about 8,000 arguments.
local function many(command, key, arguments) -- pairs or single values; key nil: the arguments are keys themselves
  for first = 1, #arguments, 1000 do
    local last = math.min(first + 999, #arguments)
    if key then call(command, key, unpack(arguments, first, last)) else call(command, unpack(arguments, first, last)) end
  end
end
local function hmget(key, serials)
  local found = {}
  for first = 1, #serials, 1000 do
    for _, value in ipairs(call('HMGET', key, unpack(serials, first, math.min(first + 999, #serials)))) do
      found[#found + 1] = value
    end
  end
  return found
end
local function records(serials)
  local found = hmget(tasks_key, serials)
  for i, packed in ipairs(found) do found[i] = cmsgpack.unpack(packed) end
  return found
end

local function in_recording(payload)
  for _, of in ipairs(call('HKEYS', base .. 'recorded')) do
    for _, group in ipairs(cmsgpack.unpack(call('HGET', base .. 'recorded', of))) do
      if group[4] == payload then return true end
    end
  end
  return false
end

-- complete: 3 node, then of each group 4 token, 5 nonce of the payload's key p:TOKEN:NONCE, which the caller has just
-- set, 6 GroupMeta as JSON, 7 sampled tokens, 8 payload bytes. Replies for each 1, 0 when its token is not current (its
-- payload is dropped then), -1 when there is no payload: nothing happened then.
if op == 'complete' then
  local node, found, cache, results = ARGV[3], {}, {}, {}
  local known, handed, size, dropped = seen(ARGV[3]), 0, 0, {}
  local saved, ended, scored, groups = {}, {}, {}, 0
  for at = 4, #ARGV, 5 do found[#found + 1] = serial_of(ARGV[at]) or '-1' end
  for i, packed in ipairs(hmget(tasks_key, found)) do cache[found[i]] = packed and cmsgpack.unpack(packed) or nil end
  for at = 4, #ARGV, 5 do
    local token, sampled = ARGV[at], tonumber(ARGV[at + 3])
    local serial, payload, result = serial_of(token) or '-1', token .. ':' .. ARGV[at + 1], 1
    local r = cache[serial]
    local current = r and r[STATE] == 'leased' and r[TOKEN] == token and r[NODES][#r[NODES]] == node
    if current and call('EXISTS', base .. 'p:' .. payload) == 0 then
      result = -1
    elseif current then
      r[STATE], r[META], r[PAYLOAD], r[BYTES] = 'ready', ARGV[at + 2], payload, tonumber(ARGV[at + 4])
      groups, size, handed = groups + 1, size + r[BYTES], handed + sampled
      saved[2 * groups - 1], saved[2 * groups] = serial, cmsgpack.pack(r)
      scored[2 * groups - 1], scored[2 * groups] = serial, serial
      ended[groups] = token
    elseif accepted(r, token, node) then
      if r and r[PAYLOAD] ~= payload or not r and not in_recording(payload) then dropped[#dropped + 1] = base .. 'p:' .. payload end
    else
      result, handed, dropped[#dropped + 1] = 0, handed + sampled, base .. 'p:' .. payload
      count('stale', 1)
      waste(node, 'lost', sampled, 0) -- the seconds were, when the lease was lost
      event('stale_result', {node = node, tokens = sampled})
    end
    results[#results + 1] = result
  end
  if known and handed > 0 then call('HINCRBY', base .. 'node:' .. node, 'handed', text(handed)) end
  many('UNLINK', nil, dropped)
  if groups > 0 then
    many('ZREM', leases_key, ended)
    many('HSET', tasks_key, saved)
    many('ZADD', ready_key, scored)
    set('bytes', st.bytes + size)
    set('acc_groups', st.acc_groups + groups)
    set('acc_bytes', st.acc_bytes + size)
    ripened = true
  end
  return finish(unpack(results))
end

-- lease: 3 node, 4 version ('' for the node's last known one: a request that waited), 5 most groups, 6 nonce,
-- 7 '1' when repeated, 8 ms that the caller will wait. Replies ms to the
-- next deadline (-1: the node is dead), lease_ms, then token, attempt, body of each.
if op == 'lease' then
  local node, nonce, most = ARGV[3], ARGV[6], math.min(tonumber(ARGV[5]), MOST)
  local found = {}
  if ARGV[7] == '1' then
    for _, token in ipairs(call('ZRANGE', leases_key, 0, -1)) do
      local _, r, current = leased_record(token, node)
      if current and string.sub(token, -#nonce) == nonce then
        for _, x in ipairs({token, r[ATTEMPTS], call('HGET', base .. 'bodies', serial_of(token))}) do found[#found + 1] = x end
      end
    end
    if #found > 0 then return finish(0, st.lease_ms, unpack(found)) end
  end
  local facts = call('HMGET', base .. 'node:' .. node, 'version', 'leased', 'in_doubt')
  if ARGV[4] == '' then
    if not call('ZSCORE', base .. 'seen', node) then return finish(-1, st.lease_ms) end
  else
    if not facts[1] then return refuse('node ' .. node .. ' is not registered with this broker; register first') end
    seen(node)
    if facts[1] ~= ARGV[4] then call('HSET', base .. 'node:' .. node, 'version', ARGV[4]) end
    if facts[3] then call('HDEL', base .. 'node:' .. node, 'in_doubt') end
    facts[1] = ARGV[4]
  end
  local version, chosen = tonumber(facts[1]), {}
  for _, serial in ipairs(call('ZRANGE', pending_key, 0, most - 1)) do
    if not admits(serial, version, #chosen) then break end
    chosen[#chosen + 1] = serial
  end
  if #chosen == 0 then
    if tonumber(ARGV[8]) > 0 then call('ZADD', base .. 'waiting', text(now + ARGV[8]), nonce .. ':' .. node) end
    local first = call('ZRANGE', leases_key, 0, 0, 'WITHSCORES')[2]
    return finish(first and tonumber(first) - now or WAKE_MS, st.lease_ms)
  end
  local deadline, packed = text(now + math.min(st.lease_ms, st.max_lease_ms)), call('HMGET', tasks_key, unpack(chosen))
  due(tonumber(deadline))
  local bodies = call('HMGET', base .. 'bodies', unpack(chosen))
  local saved, dated = {}, {}
  for i, serial in ipairs(chosen) do
    local r, token = cmsgpack.unpack(packed[i]), serial .. '.' .. nonce
    r[STATE], r[TOKEN], r[LEASED_AT], r[ATTEMPTS] = 'leased', token, now, r[ATTEMPTS] + 1
    r[NODES][#r[NODES] + 1] = node
    if #r[NODES] > MOST_NODES_NAMED then table.remove(r[NODES], 1) end
    saved[2 * i - 1], saved[2 * i] = serial, cmsgpack.pack(r)
    dated[2 * i - 1], dated[2 * i] = deadline, token
    found[3 * i - 2], found[3 * i - 1], found[3 * i] = token, r[ATTEMPTS], bodies[i]
  end
  call('HSET', tasks_key, unpack(saved))
  call('ZADD', leases_key, unpack(dated))
  call('ZREM', pending_key, unpack(chosen))
  if not facts[2] then
    call('HSET', base .. 'node:' .. node, 'leased', 1)
    event('first_lease', {node = node, version = version})
  end
  return finish(0, st.lease_ms, unpack(found))
end

-- The learner. Every move but attach and report begins with 3 incarnation and 4 instance ('' before it has attached).
local L = call('HMGET', state_key, 'l_incarnation', 'l_instance', 'l_state', 'l_pid', 'l_seen')
local incarnation = tonumber(L[1])
local ENDED, LOST_AFTER_MS = {done = true, drained = true, failed = true}, 10000
local function is_other(instance)
  return incarnation and instance ~= '' and L[2] ~= '' and instance ~= L[2]
end
local function replaced(number, instance) -- why this learner is fenced; nil when it is not
  if number == '' or not incarnation or tonumber(number) > incarnation then return nil end
  local by = 'another process of the same incarnation'
  if tonumber(number) < incarnation then
    by = 'incarnation ' .. L[1]
  elseif call('SISMEMBER', base .. 'replaced', instance) == 0 and not is_other(instance) then
    return nil
  end
  return string.format('learner incarnation %s was replaced by %s (pid %s); this process must stop', number, by, L[4])
end

-- report, attach: 3 incarnation, 4 instance, 5 state, 6 pid, 7 step, 8 LearnerReport as JSON. attach replies next serial
-- and committed step.
if op == 'report' or op == 'attach' then
  local before = incarnation and L[3]
  if incarnation and tonumber(ARGV[3]) > incarnation then
    call('DEL', base .. 'replaced')
  elseif incarnation == tonumber(ARGV[3]) and is_other(ARGV[4])
    and call('SISMEMBER', base .. 'replaced', ARGV[4]) == 0 then
    local silent = math.max(0, now - tonumber(L[5]))
    if not ENDED[L[3]] and silent <= LOST_AFTER_MS then
      return refuse(string.format('learner incarnation %s is alive already: process %s, %s, seen %.1f s ago; stop it, or '
        .. 'wait until it has been silent for %d s', ARGV[3], L[4], L[3], silent / 1000, LOST_AFTER_MS / 1000))
    end
    call('SADD', base .. 'replaced', L[2])
    incarnation = nil
  end
  local why = replaced(ARGV[3], ARGV[4])
  if why then return refuse(why) end
  call('HSET', state_key, 'l_incarnation', ARGV[3], 'l_instance', ARGV[4], 'l_state', ARGV[5], 'l_pid', ARGV[6],
    'l_seen', text(now), 'learner', ARGV[8])
  if before and before ~= ARGV[5] and ENDED[ARGV[5]] then
    event('learner_' .. ARGV[5], {incarnation = tonumber(ARGV[3]), step = tonumber(ARGV[7])})
  end
  if op == 'report' then return finish() end
  if st.next == 0 then set('first_step', tonumber(ARGV[7])) end
  event('learner_attached', {incarnation = tonumber(ARGV[3]), pid = tonumber(ARGV[6]), step = tonumber(ARGV[7])})
  return finish(st.next, st.committed)
end

local step = tonumber(ARGV[5])
local function moved() set('epoch', st.epoch + 1) end
local function taken(of) -- {places passed on, serials in the order given out}
  local packed = call('HGET', base .. 'steps', of)
  return packed and cmsgpack.unpack(packed) or {0, {}}
end
local function taken_by(first, what) -- records of ARGV[first..] that `step` holds and did not filter, or nil and why
  local found, known = {}, {}
  for i = first, #ARGV do
    local r = record(ARGV[i])
    if not r then return nil, string.format('task %s cannot be %s: it is not taken by step %s', ARGV[i], what, ARGV[5]) end
    if not known[ARGV[i]] and r[STATE] == 'taken' and r[STEP] == step and r[FILTERED] == 0 then
      found[#found + 1] = {ARGV[i], r}
    end
    known[ARGV[i]] = true
  end
  return found
end
local function waste_group(r, reason)
  local meta = cjson.decode(r[META])
  waste(r[NODES][#r[NODES]], reason, meta.sampled_tokens, meta.generation_s)
end
local function remember(r) -- that this token was accepted, once its record is gone
  call('ZADD', base .. 'remembered', text(now), r[TOKEN] .. '|' .. r[NODES][#r[NODES]])
end
if op == 'take' or op == 'offer' or op == 'regenerate' or op == 'filter' or op == 'commit' then
  local why = replaced(ARGV[3], ARGV[4])
  if why then return refuse(why) end
  if ARGV[3] ~= '' and now - (tonumber(L[5]) or 0) > 500 then set('l_seen', now) end
end

-- take: 5 step, 6 count, 7 '1' for in order, 8 nonce under which the caller waits ('': it does not). Replies nothing
-- when there are not enough, else 1 and then serial, node, meta, payload key (after 'p:') of each.
if op == 'take' then
  if step <= st.committed then
    return refuse(string.format('step %d is committed (up to %d); its groups are gone', step, st.committed))
  end
  local mine = taken(step)
  local missing = tonumber(ARGV[6]) - (#mine[2] - mine[1])
  if missing > 0 then
    local chosen = call('ZRANGE', ready_key, 0, missing - 1)
    local enough = #chosen == missing
    if enough and ARGV[7] == '1' then
      local last = tonumber(chosen[missing])
      enough = call('ZCOUNT', pending_key, '-inf', '(' .. last) == 0
      for _, token in ipairs(call('ZRANGE', leases_key, 0, -1)) do
        enough = enough and tonumber(serial_of(token)) > last
      end
    end
    if not enough then
      if missing > st.wanted then
        set('wanted', missing)
        stirred = true
      end
      if ARGV[8] ~= '' then
        if stirred then wake_nodes() end
        stirred = false
        set('taker', ARGV[8])
        set('taker_needs', missing)
      end
      return finish()
    end
    set('wanted', st.b)
    local saved = {}
    for i, r in ipairs(records(chosen)) do
      r[STATE], r[STEP] = 'taken', step
      saved[2 * i - 1], saved[2 * i] = chosen[i], cmsgpack.pack(r)
      mine[2][#mine[2] + 1] = tonumber(chosen[i])
    end
    many('HSET', tasks_key, saved)
    many('ZREM', ready_key, chosen)
    call('HSET', base .. 'steps', step, cmsgpack.pack(mine))
    moved()
    stirred = true
  end
  local groups = {}
  for i, r in ipairs(records(mine[2])) do groups[i] = {mine[2][i], r[NODES][#r[NODES]], r[META], r[PAYLOAD]} end
  return finish(1, groups)
end

-- offer: 5 nonce, 6 '1' when repeated, then serial and encoded Task of each. Replies how many were new.
if op == 'offer' then
  if ARGV[6] == '1' and call('HGET', state_key, 'offer_nonce') == ARGV[5] then
    return finish(tonumber(call('HGET', state_key, 'offer_new')))
  end
  local expected, new = st.next, 0
  for i = 7, #ARGV, 2 do
    local serial = tonumber(ARGV[i])
    if serial > expected or serial < 0 then
      return refuse(string.format('task %d was offered, the next serial is %d; offer without gaps', serial, expected))
    end
    expected = math.max(expected, serial + 1)
  end
  local records, bodies, scores = {}, {}, {}
  local fresh = cmsgpack.pack({0, 0, {}, '', 'pending', '', '', '', 0, -1, 0, 0, '', 0})
  for i = 7, #ARGV, 2 do
    if tonumber(ARGV[i]) >= st.next + new then
      records[2 * new + 1], records[2 * new + 2] = ARGV[i], fresh
      bodies[2 * new + 1], bodies[2 * new + 2] = ARGV[i], ARGV[i + 1]
      scores[2 * new + 1], scores[2 * new + 2] = ARGV[i], ARGV[i]
      new = new + 1
    end
  end
  many('HSET', tasks_key, records)
  many('HSET', base .. 'bodies', bodies)
  many('ZADD', pending_key, scores)
  set('next', expected)
  set('offer_nonce', ARGV[5])
  set('offer_new', new)
  moved()
  stirred = new > 0
  return finish(new)
end

-- regenerate: 5 step, then serials.
if op == 'regenerate' then
  local found, why = taken_by(6, 'generated again')
  if not found then return refuse(why) end
  local mine, gone = taken(step), {}
  for _, pair in ipairs(found) do
    local serial, r = pair[1], pair[2]
    waste_group(r, 'regenerated')
    remember(r)
    call('UNLINK', base .. 'p:' .. r[PAYLOAD])
    set('bytes', st.bytes - r[BYTES])
    r[META], r[PAYLOAD], r[BYTES], r[STEP] = '', '', 0, -1
    requeue(serial, r)
    gone[tonumber(serial)] = true
    event('regenerate', {serial = tonumber(serial), step = step})
  end
  local kept = {}
  for _, serial in ipairs(mine[2]) do if not gone[serial] then kept[#kept + 1] = serial end end
  if #found > 0 then call('HSET', base .. 'steps', step, cmsgpack.pack({mine[1], kept})) end
  moved()
  stirred = true
  return finish()
end

-- filter: 5 step, 6 most that may pass their place on, then serials.
if op == 'filter' then
  local found, why = taken_by(7, 'filtered')
  if not found then return refuse(why) end
  local mine, passed = taken(step), 0
  for _, pair in ipairs(found) do
    pair[2][FILTERED] = 1
    waste_group(pair[2], 'filtered')
    save(pair[1], pair[2])
    if mine[1] < tonumber(ARGV[6]) then
      mine[1], passed = mine[1] + 1, passed + 1
      call('ZADD', base .. 'passed', pair[1], pair[1])
    end
  end
  if #found > 0 then
    call('HSET', base .. 'steps', step, cmsgpack.pack(mine))
    count('filtered', #found)
    event('filter', {step = step, groups = #found, replaced = passed})
  end
  moved()
  stirred = passed > 0
  return finish()
end

local function forget_passed() -- nobody asks about serials below the oldest living task again
  local oldest = st.next
  local function living(serial) oldest = math.min(oldest, tonumber(serial) or oldest) end
  living(call('ZRANGE', pending_key, 0, 0)[1])
  living(call('ZRANGE', ready_key, 0, 0)[1])
  for _, token in ipairs(call('ZRANGE', leases_key, 0, -1)) do living(serial_of(token)) end
  for _, of in ipairs(call('HKEYS', base .. 'steps')) do
    for _, serial in ipairs(taken(of)[2]) do living(serial) end
  end
  local gone = call('ZREMRANGEBYSCORE', base .. 'passed', '-inf', '(' .. text(oldest))
  if gone > 0 then set('passed_gone', st.passed_gone + gone) end
end

-- commit: 5 step. The groups of the newest `retain` committed steps are kept.
if op == 'commit' then
  local steps, highest, groups, lines = call('HKEYS', base .. 'steps'), st.committed, 0, {}
  table.sort(steps, function(a, b) return tonumber(a) < tonumber(b) end)
  if #steps > 0 then highest = tonumber(steps[#steps]) end
  for _, of in ipairs(steps) do
    if tonumber(of) <= step then
      local serials, kept, gone, bytes = taken(of)[2], {}, {}, st.bytes
      local bodies = hmget(base .. 'bodies', serials)
      for i, r in ipairs(records(serials)) do
        local node = r[NODES][#r[NODES]]
        kept[i] = {serials[i], node, r[META], r[PAYLOAD], bodies[i], r[FILTERED]}
        gone[2 * i - 1], gone[2 * i] = text(now), r[TOKEN] .. '|' .. node
        bytes = bytes - r[BYTES]
        lines[#lines + 1] = ledger_line(serials[i], r, 'committed')
      end
      set('bytes', bytes)
      many('ZADD', base .. 'remembered', gone)
      many('HDEL', tasks_key, serials)
      many('HDEL', base .. 'bodies', serials)
      groups = groups + #kept
      call('HDEL', base .. 'steps', of)
      call('HSET', base .. 'recorded', of, cmsgpack.pack(kept))
      call('ZADD', base .. 'recorded_steps', of, of)
    end
  end
  set('committed', math.max(st.committed, math.min(step, highest)))
  forget_passed()
  moved()
  for _, of in ipairs(call('ZRANGE', base .. 'recorded_steps', 0, -1 - st.retain)) do
    local payloads = {}
    for i, group in ipairs(cmsgpack.unpack(call('HGET', base .. 'recorded', of))) do
      payloads[i] = base .. 'p:' .. group[4]
    end
    many('UNLINK', nil, payloads)
    call('HDEL', base .. 'recorded', of)
    call('ZREM', base .. 'recorded_steps', of)
  end
  if groups > 0 then
    call('APPEND', base .. 'ledger', table.concat(lines))
    call('ZREMRANGEBYRANK', base .. 'remembered', 0, -1 - REMEMBERED_TOKENS)
    count('committed_groups', groups)
    event('commit', {step = step, groups = groups})
    stirred = true
  end
  return finish()
end

-- Nodes.
local function lose_all(node, give_up) -- give_up(serial, record) for every lease of the node
  for _, token in ipairs(call('ZRANGE', leases_key, 0, -1)) do
    local serial, r, current = leased_record(token, node)
    if current then give_up(serial, r) end
  end
end
local function hand_back(serial, r) -- without counting the attempt
  call('ZREM', leases_key, r[TOKEN])
  r[ATTEMPTS] = r[ATTEMPTS] - 1
  requeue(serial, r)
end
local function register(report, node, pid, host, version)
  local key = base .. 'node:' .. node
  local old = call('HMGET', key, 'pid', 'host', 'report')
  local restarted = old[1] and (old[1] ~= pid or old[2] ~= host)
  if restarted then
    lose_all(node, function(serial, r) take_back(serial, r, 'node ' .. node .. ' restarted') end)
    end_process(node)
  end
  call('HSET', key, 'report', report, 'pid', pid, 'host', host, 'version', version)
  call('HDEL', key, 'in_doubt')
  call('ZREM', base .. 'gone', node)
  call('ZADD', base .. 'seen', text(now), node)
  due(now + st.lease_ms)
  if not old[1] or restarted then event('join', {node = node, pid = tonumber(pid), host = host}) end
  stirred = true
end

-- register: 3 NodeReport as JSON, 4 node, 5 pid, 6 host, 7 version. Replies RunInfo as JSON.
local function too_many(node)
  local others = call('ZCARD', base .. 'seen') + call('ZCARD', base .. 'gone')
  if others < MOST_NODES or call('EXISTS', base .. 'node:' .. node) == 1 then return nil end
  return others .. ' nodes have joined, which is as many as this broker takes'
end
if op == 'register' then
  if too_many(ARGV[4]) then return refuse(too_many(ARGV[4])) end
  register(ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
  return finish(call('HGET', state_key, 'run'))
end

-- heartbeat: as register, then tokens to renew. Replies the learner's report as JSON (or ''), then the lost tokens.
if op == 'heartbeat' then
  local report, node, key = ARGV[3], ARGV[4], base .. 'node:' .. ARGV[4]
  local old = call('HMGET', key, 'pid', 'host', 'version', 'in_doubt')
  if not old[1] then
    if too_many(node) then return refuse(too_many(node)) end
    register(report, node, ARGV[5], ARGV[6], ARGV[7])
  elseif old[1] ~= ARGV[5] or old[2] ~= ARGV[6] then
    return refuse(string.format("node id '%s' belongs to process %s on %s now; every node needs an id of its own", node,
      old[1], old[2] ~= '' and old[2] or 'this host'))
  else
    seen(node)
    local version = ARGV[7]
    if tonumber(version) < tonumber(old[3]) and not old[4] then -- see broker/delivery/nodes.py: overtaken by a request, or true
      version = old[3]
      call('HSET', key, 'in_doubt', 1)
    elseif old[4] then
      call('HDEL', key, 'in_doubt')
    end
    call('HSET', key, 'report', report, 'version', version)
    stirred = old[3] ~= version
  end
  local lost = {}
  for i = 8, #ARGV do
    local _, r, current = leased_record(ARGV[i], node)
    if current then
      call('ZADD', leases_key, text(math.min(now + st.lease_ms, r[LEASED_AT] + st.max_lease_ms)), ARGV[i])
    elseif not accepted(r, ARGV[i], node) then
      lost[#lost + 1] = ARGV[i]
    end
  end
  return finish(call('HGET', state_key, 'learner') or '', lost)
end

-- fail: 3 node, 4 token, 5 reason, 6 tokens, 7 seconds. release: 3 node, then tokens. leave: 3 node.
if op == 'fail' then
  seen(ARGV[3])
  local serial, r, current = leased_record(ARGV[4], ARGV[3])
  if current then
    event('group_failed', {serial = tonumber(serial), node = ARGV[3], reason = ARGV[5]})
    waste(ARGV[3], 'failed', tonumber(ARGV[6]), tonumber(ARGV[7]))
    lose(serial, r, ARGV[5])
  end
  return finish()
end
if op == 'release' then
  seen(ARGV[3])
  for i = 4, #ARGV do
    local serial, r, current = leased_record(ARGV[i], ARGV[3])
    if current then hand_back(serial, r) end
  end
  stirred = true
  return finish()
end
if op == 'leave' then
  local pid = call('HGET', base .. 'node:' .. ARGV[3], 'pid')
  if pid then
    lose_all(ARGV[3], hand_back)
    forget(ARGV[3])
    event('leave', {node = ARGV[3], pid = tonumber(pid)})
  end
  for _, waiter in ipairs(call('ZRANGE', base .. 'waiting', 0, -1)) do
    local nonce, node = string.match(waiter, '^(%x+):(.*)$')
    if node == ARGV[3] then
      call('ZREM', base .. 'waiting', waiter)
      wake(nonce)
    end
  end
  return finish()
end

-- cancel: 3 nonce, 4 node; what was leased under this nonce is handed back: nobody heard of it.
-- sweep: nothing; the keeper calls it about once a second.
if op == 'cancel' then
  call('ZREM', base .. 'waiting', ARGV[3] .. ':' .. ARGV[4])
  call('DEL', base .. 'wake:' .. ARGV[3])
  lose_all(ARGV[4], function(serial, r)
    if string.sub(r[TOKEN], -#ARGV[3]) == ARGV[3] then hand_back(serial, r) end
  end)
  return finish()
end
if op == 'sweep' then return finish() end

-- recorded: 3 step, committed and kept, or not committed. Replies {serial, node, meta, payload key (after 'p:'), body, 1
-- if filtered} of each of its groups.
if op == 'recorded' then
  local packed = call('HGET', base .. 'recorded', ARGV[3])
  if packed then return finish(unpack(cmsgpack.unpack(packed))) end
  local groups, serials = {}, taken(ARGV[3])[2]
  local bodies = hmget(base .. 'bodies', serials)
  for i, r in ipairs(records(serials)) do
    groups[i] = {serials[i], r[NODES][#r[NODES]], r[META], r[PAYLOAD], bodies[i], r[FILTERED]}
  end
  return finish(unpack(groups))
end
-- orphans: names of payload keys (after 'p:'). Drops those that no task, lease or recorded step has: a node set them and
-- died before its move. Replies how many.
if op == 'orphans' then
  local kept, dropped = {}, {}
  for _, packed in ipairs(call('HVALS', base .. 'recorded')) do
    for _, group in ipairs(cmsgpack.unpack(packed)) do kept[group[4]] = true end
  end
  for i = 3, #ARGV do
    local token = string.match(ARGV[i], '^(.*):')
    local r = token and serial_of(token) and record(serial_of(token))
    local wanted = r and (r[PAYLOAD] == ARGV[i] or (r[STATE] == 'leased' and r[TOKEN] == token))
    if not kept[ARGV[i]] and not wanted then dropped[#dropped + 1] = base .. 'p:' .. ARGV[i] end
  end
  many('UNLINK', nil, dropped)
  return finish(#dropped)
end
return refuse('unknown move ' .. op)
