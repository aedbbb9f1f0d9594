#pragma once

// The Lua script of each operation, which Redis runs atomically (EVAL). The data of a store with prefix P, which is
// KEYS[1] of every script:
//
//   P:data            hash    the keys and their values
//   P:queue:<key>     list    a queue
//   P:barrier:<key>   hash    "count", and for each arrival's id the deadline of its wait (ms since 1970)
//   P:claims          hash    for each lock its expiry (16 digits, ms since 1970), token (32 digits) and value
//   P:event:<key>     channel with a message when the key or a queue item appears, or the barrier is released
//
// A script that may have to wait returns a list when it is done. Otherwise it returns the number of the missing key,
// counted from 1. The script's first argument is the number of the key to continue with.

namespace muster::redis_scripts {

inline constexpr const char* kSet = R"(
if redis.call('HSET', KEYS[1]..':data', ARGV[1], ARGV[2]) == 1 then
  redis.call('PUBLISH', KEYS[1]..':event:'..ARGV[1], '')
end
return 1)";

inline constexpr const char* kMultiSet = R"(
for i = 1, #ARGV, 2 do
  if redis.call('HSET', KEYS[1]..':data', ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('PUBLISH', KEYS[1]..':event:'..ARGV[i], '')
  end
end
return 1)";

// Returns the values of the keys.
inline constexpr const char* kGet = R"(
local data, values = KEYS[1]..':data', {}
for i = tonumber(ARGV[1]) + 1, #ARGV do
  if redis.call('HEXISTS', data, ARGV[i]) == 0 then return i - 1 end
end
for i = 2, #ARGV do
  local value = redis.call('HGET', data, ARGV[i])
  if not value then return i - 1 end
  values[i - 1] = value
end
return values)";

// Returns an empty list once each key, or a queue of that name, exists.
inline constexpr const char* kWait = R"(
local function absent(i)
  if redis.call('HEXISTS', KEYS[1]..':data', ARGV[i]) == 1 then return false end
  return redis.call('EXISTS', KEYS[1]..':queue:'..ARGV[i]) == 0
end
for i = tonumber(ARGV[1]) + 1, #ARGV do
  if absent(i) then return i - 1 end
end
for i = 2, math.min(#ARGV, tonumber(ARGV[1])) do
  if absent(i) then return i - 1 end
end
return {})";

inline constexpr const char* kCompareSet = R"(
local data, key, expected, desired = KEYS[1]..':data', ARGV[1], ARGV[2], ARGV[3]
local now = redis.call('HGET', data, key)
if (now or '') ~= expected then return now or expected end
redis.call('HSET', data, key, desired)
if not now then redis.call('PUBLISH', KEYS[1]..':event:'..key, '') end
return desired)";

// Returns the sum as text, because Lua's numbers have 53 bits. An empty value counts as 0.
inline constexpr const char* kAdd = R"(
local data, key = KEYS[1]..':data', ARGV[1]
local before = redis.call('HGET', data, key)
if before == '' then redis.call('HSET', data, key, '0') end
local sum = redis.pcall('HINCRBY', data, key, ARGV[2])
if type(sum) == 'table' then return sum end
if not before then redis.call('PUBLISH', KEYS[1]..':event:'..key, '') end
return redis.call('HGET', data, key))";

inline constexpr const char* kAppend = R"(
local data, key = KEYS[1]..':data', ARGV[1]
local before = redis.call('HGET', data, key)
if before and #before + #ARGV[2] > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', data, key, (before or '')..ARGV[2])
if not before then redis.call('PUBLISH', KEYS[1]..':event:'..key, '') end
return 1)";

inline constexpr const char* kListKeys = R"(
local found = {}
for _, key in ipairs(redis.call('HKEYS', KEYS[1]..':data')) do
  if string.sub(key, 1, #ARGV[1]) == ARGV[1] then found[#found + 1] = key end
end
return found)";

inline constexpr const char* kPush = R"(
redis.call('RPUSH', KEYS[1]..':queue:'..ARGV[1], ARGV[2])
redis.call('PUBLISH', KEYS[1]..':event:'..ARGV[1], '')
return 1)";

// Returns the length before the pop, and the item.
inline constexpr const char* kPop = R"(
local queue = KEYS[1]..':queue:'..ARGV[2]
local item = redis.call('LPOP', queue)
if not item then return 1 end
return {redis.call('LLEN', queue) + 1, item})";

// Arguments: 1, key, count, id, timeout in ms. A release removes the arrivals from the hash, so a caller checks whether
// its arrival is still there. A later call removes the arrivals of dead callers, a minute after their timeout. Returns
// an empty list if the caller is released, and 1 if it has to wait. If the counts differ, returns the number of waiting
// callers and their count.
inline constexpr const char* kArrive = R"(
local barrier, count = KEYS[1]..':barrier:'..ARGV[2], ARGV[3]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local function arrived() return math.max(0, redis.call('HLEN', barrier) - 1) end
local function other() return (redis.call('HGET', barrier, 'count') or count) ~= count end
if other() or arrived() + 1 >= tonumber(count) then
  local all = redis.call('HGETALL', barrier)
  for i = 1, #all, 2 do
    if all[i] ~= 'count' and tonumber(all[i + 1]) + 60000 < now then redis.call('HDEL', barrier, all[i]) end
  end
  if arrived() == 0 then redis.call('DEL', barrier) end
end
if other() then return {arrived(), redis.call('HGET', barrier, 'count')} end
redis.call('HSET', barrier, 'count', count, ARGV[4], string.format('%.0f', now + tonumber(ARGV[5])))
if arrived() < tonumber(count) then return 1 end
redis.call('DEL', barrier)
redis.call('PUBLISH', KEYS[1]..':event:'..ARGV[2], '')
return {})";

inline constexpr const char* kReleased = R"(
if redis.call('HEXISTS', KEYS[1]..':barrier:'..ARGV[2], ARGV[4]) == 1 then return 1 end
return {})";

// Returns 1 if the arrival was not released before.
inline constexpr const char* kWithdraw = R"(
local barrier = KEYS[1]..':barrier:'..ARGV[2]
local gone = redis.call('HDEL', barrier, ARGV[4])
if redis.call('HLEN', barrier) <= 1 then redis.call('DEL', barrier) end
return gone)";

// Arguments: name, token, time to live in ms, value. Returns 1 if the lock was free.
inline constexpr const char* kClaim = R"(
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGET', KEYS[1]..':claims', ARGV[1])
if held and tonumber(string.sub(held, 1, 16)) > now then return 0 end
local until_then = string.format('%016.0f', now + tonumber(ARGV[3]))
redis.call('HSET', KEYS[1]..':claims', ARGV[1], until_then..ARGV[2]..ARGV[4])
return 1)";

// Arguments as for kClaim. Returns 1 if this token still held the lock. A time to live of 0 ms releases it.
inline constexpr const char* kRenew = R"(
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local held = redis.call('HGET', KEYS[1]..':claims', ARGV[1])
if not held or string.sub(held, 17, 48) ~= ARGV[2] or tonumber(string.sub(held, 1, 16)) <= now then return 0 end
if ARGV[3] == '0' then return redis.call('HDEL', KEYS[1]..':claims', ARGV[1]) end
local until_then = string.format('%016.0f', now + tonumber(ARGV[3]))
redis.call('HSET', KEYS[1]..':claims', ARGV[1], until_then..string.sub(held, 17))
return 1)";

// Returns name, value, name, value, ... of the locks whose names begin with the argument. Deletes expired locks.
inline constexpr const char* kClaims = R"(
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, found = redis.call('HGETALL', KEYS[1]..':claims'), {}
for i = 1, #all, 2 do
  if tonumber(string.sub(all[i + 1], 1, 16)) <= now then
    redis.call('HDEL', KEYS[1]..':claims', all[i])
  elseif string.sub(all[i], 1, #ARGV[1]) == ARGV[1] then
    found[#found + 1] = all[i]
    found[#found + 1] = string.sub(all[i + 1], 49)
  end
end
return found)";

}  // namespace muster::redis_scripts
