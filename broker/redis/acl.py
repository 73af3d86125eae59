"""Which commands a role needs: an ACL line per role, for docs/redis.md and for a server's users.acl.

Scripts run with the permissions of who calls them, so a node must be allowed every command that its moves use, on the
keys of its run. The lines keep a role to one run, keep observers from writing, and keep all from administration; they
do not keep a node that holds its password from writing nonsense into its own run.
"""

from typing import Literal

from broker.redis.keys import RUNS, run_prefix

AclRole = Literal["node", "learner", "observer", "broker"]

_READ = "select ping get smembers time multi exec hgetall zcard zrange xrange"
_MOVES = (
    "select ping eval evalsha time get smembers exists del unlink pexpire lpush blpop append hget hmget hset "
    "hdel hkeys hincrby hincrbyfloat zadd zrem zcard zcount zrange zrangebyscore zscore zremrangebyscore "
    "zremrangebyrank xadd sadd sismember"
)
COMMANDS: dict[AclRole, str] = {
    "observer": _READ,
    "node": f"{_MOVES} set",
    "learner": f"{_MOVES} multi exec hgetall xrange",
    "broker": f"{_MOVES} set multi exec hgetall hvals scan xrange info config|get",
}


def acl_line(role: AclRole, run: str, password: str) -> str:
    """What follows `ACL SETUSER`, or `user` in users.acl; `password` may be a placeholder."""
    allowed = " ".join(f"+{command}" for command in COMMANDS[role].split())
    keys = f"~{run_prefix(run)}* ~{RUNS.decode()}"
    return f"{role} reset on >{password} resetchannels {keys} -@all {allowed}"
