-- The fenced operations of the Redis store. No rule of delivery is here: only who may write, and what follows what.
--
-- KEYS  1 head: hash of term, leader, seq, about   2 leader: string that expires with the term
--       3 log: list of batches   4 history: list of records of finished tasks
-- ARGV  1 operation  2 name of the caller (JSON)  3 its term  4 ms for which a term lasts without renewal; the rest:
--       take     5 name of a leader that has surely ended, or ''
--       append   5 seq of the last record  6 seq of the new last record  7 batch, or '' to renew the term only
--       compact  5, 6 like append; 5 is '' where the log may lack records  7 snapshot  8 size of the history
--                9 record of the history, or ''  10 which store this is
--       renew, resign
-- reply {status, term, leader, seq}; status: ok, led (another one leads), fenced, behind (the log lacks records)
local head = redis.call('HMGET', KEYS[1], 'term', 'leader', 'seq')
local term, leader, seq = tonumber(head[1] or 0), head[2] or '', head[3] or '0'
local operation, me, mine = ARGV[1], ARGV[2], tonumber(ARGV[3])

if operation == 'take' then
  local other = redis.call('GET', KEYS[2])
  if other and other ~= me and other ~= ARGV[5] then return {'led', term, other, seq} end
  term = math.max(term, mine) + 1
  redis.call('HSET', KEYS[1], 'term', term, 'leader', me)
elseif term > mine or (term == mine and leader ~= me) then
  return {'fenced', term, leader, seq}
elseif operation == 'resign' then
  redis.call('DEL', KEYS[2])
  return {'ok', term, me, seq}
elseif operation ~= 'renew' and (ARGV[6] ~= seq or term < mine) then -- otherwise this is a repetition of what was done
  if ARGV[5] ~= '' and (ARGV[5] ~= seq or term < mine) then return {'behind', term, leader, seq} end
  if operation == 'append' then
    redis.call('RPUSH', KEYS[3], ARGV[7])
  else
    if ARGV[8] == '0' then redis.call('DEL', KEYS[4]) else redis.call('LTRIM', KEYS[4], 0, ARGV[8] - 1) end
    if ARGV[9] ~= '' then redis.call('RPUSH', KEYS[4], ARGV[9]) end
    redis.call('DEL', KEYS[3])
    redis.call('RPUSH', KEYS[3], ARGV[7])
    redis.call('HSET', KEYS[1], 'about', ARGV[10])
  end
  redis.call('HSET', KEYS[1], 'term', mine, 'leader', me, 'seq', ARGV[6])
end
redis.call('SET', KEYS[2], me, 'PX', ARGV[4])
return {'ok', term, me, ARGV[6] or seq}
