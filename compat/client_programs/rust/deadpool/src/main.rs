// deadpool-redis: pools of redis-rs' connections, and of its cluster connections, for tokio's tasks.
#[path = "../../steps.rs"]
mod steps;

use std::future::Future;

use deadpool_redis::redis::{cmd, pipe, AsyncCommands, RedisError, Script};
use deadpool_redis::{cluster, Config, Pool, Runtime};
use steps::*;
use tokio::time::{sleep, Duration, Instant};

#[tokio::main]
async fn main() {
    trust();
    if place() == "cluster" {
        return of_cluster().await;
    }
    let pool = Config::from_url(url()).create_pool(Some(Runtime::Tokio1)).unwrap();
    let read = |key| {
        let pool = pool.clone();
        async move { pool.get().await.ok()?.get(key).await.ok() }
    };
    step("right values of tasks", Ok::<_, String>(right_values(read).await));
    let mut own = pool.get().await.unwrap();
    step("MGET", own.mget::<_, Vec<Option<String>>>(&[text(1), "job:text:none".into(), text(299)]).await);
    step("WRONGTYPE", own.hlen::<_, i64>(text(7)).await);
    let mut pipeline = pipe();
    all_texts().iter().for_each(|key| {
        pipeline.get(key);
    });
    step("a pipeline", pipeline.query_async::<Vec<String>>(&mut own).await);
    step("MULTI", pipe().atomic().get(text(7)).strlen(text(7)).query_async::<(String, i64)>(&mut own).await);
    step("a key of others", own.hlen::<_, i64>("job:map:flight").await);
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

/// Read all texts, each by a task of its own, and return the number of right values.
async fn right_values<F>(read: impl Fn(String) -> F) -> usize
where
    F: Future<Output = Option<String>> + Send + 'static,
{
    let tasks: Vec<_> = all_texts().into_iter().map(|key| tokio::spawn(read(key))).collect();
    let mut right = 0;
    for (number, task) in tasks.into_iter().enumerate() {
        right += (task.await.unwrap() == Some(number.to_string())) as usize;
    }
    right
}

async fn of_cluster() {
    let pool = cluster::Config::from_urls([url()]).create_pool(Some(Runtime::Tokio1)).unwrap();
    let read = |key| {
        let pool = pool.clone();
        async move { pool.get().await.ok()?.get(key).await.ok() }
    };
    step("right values of tasks", Ok::<_, String>(right_values(read).await));
    step("MGET of all slots", pool.get().await.unwrap().mget::<_, Vec<String>>(all_texts()).await);
    ask("kill job:text:007");
    step("right values after a server's end", Ok::<_, String>(until_equal(|| right_values(read), TEXTS).await));
    ask("put job:text:live 2");
    step("a new value after it", Ok::<_, String>(until_equal(|| read("job:text:live".into()), Some("2".into())).await));
}

/// Call until the result is the expected one, and return it.
async fn until_equal<T: PartialEq, F: Future<Output = T>>(find: impl Fn() -> F, expected: T) -> T {
    let end = Instant::now() + WAIT_MAX;
    loop {
        let found = find().await;
        if found == expected || Instant::now() > end {
            return found;
        }
        sleep(Duration::from_millis(10)).await;
    }
}
