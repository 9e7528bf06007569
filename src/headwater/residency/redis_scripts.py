"""What a Redis server runs for the residency index: one script that takes an update in, one that answers a look-up.

In the server, under a prefix: one string per block (its 32-byte key) with nine bytes for each node that holds it: a
*term* (8 bytes, of a node, epoch and round) and the tiers; `terms`, a hash of the terms that count: until when, whether
doubtful, whose; and `nodes`, a hash of one record per node. An entry counts if its term does; so a round, a restart or
a dead node voids entries without touching them. Entries that count no more are left out when a block's string is next
written, and every string has a time to live; the hashes have none, so that a server that is full and evicts by time to
live keeps them.

A record is text: epoch, sequence, end of the lease (ms of the server's clock), the term of the last whole round (or, as
long as there is none, of the one that was broken off) and of the one under way (16 hex digits or -), whether something
was lost since the last whole round, and whether the round under way is still whole. Only the update script writes
records and terms, both at once.

Scripts run alone in the server, so an update counts whole or not at all, and a look-up sees one moment. They are kept
short: some hundred blocks each (an update), or about a microsecond per block until nobody has the next (a look-up).
"""

from typing import Final

REMEMBERED_MS: Final = 3_600_000  # how long the epoch of a node that went silent is known

_COMMON: Final = b"""
local prefix = ARGV[1]
local nodes, terms = prefix .. 'nodes', prefix .. 'terms'
if redis.replicate_commands then redis.replicate_commands() end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local known = {}
local function counts(term)  -- whether it does: then its doubt and its node, as '0node'
  if known[term] == nil then
    local until_ms, node = string.match(redis.call('HGET', terms, term) or '', '^(%d+) (.+)$')
    known[term] = until_ms and tonumber(until_ms) > now and node
  end
  return known[term]
end
"""

UPDATE: Final = (
    _COMMON
    + b"""
local node, kind, epoch, sequence, term = ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local lease_ms, keep_ms, remembered_ms = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[9])
local keys, states = ARGV[10], ARGV[11]

local function read(text)
  local epoch, sequence, until_ms, whole, under_way, doubtful, sound =
    string.match(text or '', '^(%d+) (%d+) (%d+) (%S+) (%S+) ([01]) ([01])$')
  if not epoch then return nil end
  return {epoch = tonumber(epoch), sequence = tonumber(sequence), until_ms = tonumber(until_ms),
          whole = whole, under_way = under_way, doubtful = doubtful == '1', sound = sound == '1'}
end
local function hex(bytes)
  return (string.gsub(bytes, '.', function(c) return string.format('%02x', string.byte(c)) end))
end
local function raw(hex)
  return (string.gsub(hex, '%x%x', function(c) return string.char(tonumber(c, 16)) end))
end

local record = read(redis.call('HGET', nodes, node))
if record and epoch < record.epoch then return 'fenced' end
local function needs_round(record)
  return record.doubtful and not (record.under_way ~= '-' and record.sound)
end
if record and epoch == record.epoch and sequence <= record.sequence then
  return needs_round(record) and 'resync' or 'stale'
end
local old = record and {raw(record.whole), raw(record.under_way)} or {'-', '-'}
if not record or epoch > record.epoch then
  record = {sequence = sequence - 1, until_ms = 0, whole = '-', under_way = '-', doubtful = false, sound = true}
end
if record.until_ms <= now then record.whole, record.under_way = '-', '-' end

local said, answer = hex(term), 'applied'
if sequence > record.sequence + 1 then record.doubtful, record.sound = true, false end
if kind == 'begin' then
  if record.whole == '-' then record.whole = record.under_way end
  record.under_way, record.sound = said, true
  local all = redis.call('HGETALL', nodes)
  for i = 1, #all, 2 do
    local other = read(all[i + 1])
    if other and other.until_ms + remembered_ms < now then
      redis.call('HDEL', terms, raw(other.whole), raw(other.under_way))
      redis.call('HDEL', nodes, all[i])
    end
  end
elseif kind == 'leave' then
  record.whole, record.under_way, lease_ms = '-', '-', 0
elseif said ~= record.whole and said ~= record.under_way then  -- and not stale if it is said again
  answer, record.whole, record.under_way, lease_ms, sequence = 'unknown', '-', '-', 0, record.sequence
end

known[term], known[old[1]], known[old[2]] = false, false, false  -- what we said before of a block is left out
for i = 1, answer == 'unknown' and 0 or #states do
  local name = prefix .. string.sub(keys, 32 * i - 31, 32 * i)
  local value = redis.pcall('GET', name)
  if type(value) ~= 'string' or #value % 9 ~= 0 then value = '' end
  local kept, state = {}, string.sub(states, i, i)
  for at = 1, #value, 9 do
    if counts(string.sub(value, at, at + 7)) then kept[#kept + 1] = string.sub(value, at, at + 8) end
  end
  if state ~= '\\0' then
    kept[#kept + 1] = term .. state
    redis.call('SET', name, table.concat(kept), 'PX', keep_ms)
  elseif #kept > 0 then
    redis.call('SET', name, table.concat(kept), 'KEEPTTL')
  else
    redis.call('DEL', name)
  end
end

if kind == 'end' and said == record.under_way and record.sound then
  record.whole, record.under_way, record.doubtful = said, '-', false
end
if answer == 'applied' and needs_round(record) and kind ~= 'leave' then answer = 'resync' end
redis.call('HDEL', terms, old[1], old[2])
local whose = string.format('%.0f %d%s', now + lease_ms, record.doubtful and 1 or 0, node)
for _, one in ipairs({record.whole, record.under_way}) do
  if one ~= '-' then redis.call('HSET', terms, raw(one), whose) end
end
redis.call('HSET', nodes, node, string.format('%.0f %.0f %.0f %s %s %d %d', epoch, sequence, now + lease_ms,
  record.whole, record.under_way, record.doubtful and 1 or 0, record.sound and 1 or 0))
return answer
"""
)

LOOKUP: Final = (
    _COMMON
    + b"""
local keys = ARGV[2]
local num, at, size = #keys / 32, 0, 64
local found, last, count = {}, nil, 0
while at < num and last ~= false do
  size = math.min(size, num - at)
  local names = {}
  for i = 1, size do names[i] = prefix .. string.sub(keys, (at + i) * 32 - 31, (at + i) * 32) end
  local values = redis.call('MGET', unpack(names))
  for i = 1, size do
    if values[i] == last then
      count = count + 1
    else
      if last then found[#found + 1] = last; found[#found + 1] = count end
      last, count = values[i], 1
      if not last then break end
    end
  end
  at, size = at + size, math.min(2 * size, 512)
end
if last then found[#found + 1] = last; found[#found + 1] = count end
for i = 1, #found, 2 do
  for at = 1, #found[i], 9 do counts(string.sub(found[i], at, at + 7)) end
end
local owners = {}
for term, whose in pairs(known) do
  if whose then owners[#owners + 1] = term .. string.format('%04d', #whose) .. whose end
end
return {found, table.concat(owners)}  -- one word of all owners: clients are slow at many
"""
)
