// deadpool-redis: a pool of redis-rs' connections for tokio's tasks.
#[path = "../../steps.rs"]
mod steps;

use deadpool_redis::redis::{cmd, pipe, AsyncCommands, RedisError, Script};
use deadpool_redis::{Config, Pool, Runtime};
use steps::*;

#[tokio::main]
async fn main() {
    let pool = Config::from_url(url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    step("right values of tasks", Ok::<_, String>(right_values(&pool).await));
    let mut own = pool.get().await.unwrap();
    step("MGET", own.mget::<_, Vec<Option<String>>>(&[text(1), "job:text:none".into(), text(299)]).await);
    step("WRONGTYPE", own.hlen::<_, i64>(text(7)).await);
    let mut pipeline = pipe();
    all_texts().iter().for_each(|key| {
        pipeline.get(key);
    });
    step("a pipeline", pipeline.query_async::<Vec<String>>(&mut own).await);
    step("MULTI", pipe().atomic().get(text(7)).hget("job:map:flight", "to").query_async::<(String, String)>(&mut own).await);
    if place() == "upstream" {
        step("SET, GET", pipe().set("own:text", "a").ignore().get("own:text").query_async::<(String,)>(&mut own).await);
        step("MULTI of both", pipe().atomic().incr("own:counter", 1).get(text(7)).query_async::<(i64, String)>(&mut own).await);
        let script = Script::new("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])");
        step("a script", script.key("own:text").arg("d").invoke_async::<String>(&mut own).await);
        step("DEL", own.del::<_, i64>(&["own:text", "own:counter"]).await);
    } else {
        step("a refused write", own.set::<_, _, ()>(text(7), "x").await);
        step("a read after it", own.get::<_, String>(text(7)).await);
    }
    step("after its connection was killed", replaced(&pool, own).await);
}

/// Kill a connection, and give it back: the pool must notice.
async fn replaced(pool: &Pool, mut own: deadpool_redis::Connection) -> Result<(i64, String), RedisError> {
    let id: i64 = cmd("CLIENT").arg("ID").query_async(&mut own).await?;
    let mut other = pool.get().await.unwrap();
    let killed = cmd("CLIENT").arg("KILL").arg("ID").arg(id).query_async(&mut other).await?;
    drop((own, other));
    for _ in 0..pool.status().size {
        pool.get().await.unwrap().get::<_, String>(text(7)).await?;
    }
    Ok((killed, pool.get().await.unwrap().get(text(7)).await?))
}

async fn right_values(pool: &Pool) -> usize {
    let tasks: Vec<_> = (0..TEXTS)
        .map(|number| {
            let pool = pool.clone();
            tokio::spawn(async move { pool.get().await.unwrap().get::<_, String>(text(number)).await })
        })
        .collect();
    let mut right = 0;
    for (number, task) in tasks.into_iter().enumerate() {
        right += (task.await.unwrap().ok() == Some(number.to_string())) as usize;
    }
    right
}
