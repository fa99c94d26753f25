// fred: one connection that sends what all tasks ask at once, a subscriber; the cluster's client.
#[path = "../../steps.rs"]
mod steps;

use std::collections::BTreeMap;
use std::time::Duration;

use fred::prelude::*;
use fred::types::client::ClientKillFilter;
use fred::util::redis_keyslot;
use steps::*;
use tokio::time::{sleep, timeout, Instant};

#[tokio::main]
async fn main() {
    trust();
    let scheme = if place() == "cluster" { "redis-cluster" } else { "redis" };
    let config = Config::from_url(&url().replace("redis", scheme)).unwrap();
    // Without these, requests wait for ever once a connection has ended.
    let client = Builder::from_config(config)
        .set_policy(ReconnectPolicy::new_constant(0, 100))
        .with_performance_config(|given| given.default_command_timeout = Duration::from_secs(10))
        .build()
        .unwrap();
    client.init().await.unwrap();
    texts(&client).await;
    if place() != "tls" {
        reads(&client).await;
    }
    if place() == "upstream" {
        without_policy(&client).await;
    }
    match place().as_str() {
        "cluster" => ends(&client).await,
        "upstream" => writes(&client).await,
        _ => {
            step("a refused write", client.set::<(), _, _>(text(7), "x", None, None, false).await);
            step("a read after it", client.get::<String, _>(text(7)).await);
        }
    }
}

async fn texts(client: &Client) {
    step("all texts at once", all(client).await);
    step("a missing key", client.get::<Option<String>, _>("job:text:none").await);
    let pipeline = client.pipeline();
    for key in all_texts() {
        let _: () = pipeline.get(key).await.unwrap();
    }
    step("a pipeline", pipeline.all::<Vec<String>>().await);
    step("WRONGTYPE", client.hlen::<i64, _>(text(7)).await);
    step("a key of others", client.hlen::<i64, _>("job:map:flight").await);
    let transaction = client.multi();
    let _: () = transaction.get(text(7)).await.unwrap();
    let _: () = transaction.strlen(text(7)).await.unwrap();
    step("MULTI", transaction.exec::<(String, i64)>(true).await);
}

async fn reads(client: &Client) {
    step("HGETALL", client.hgetall::<BTreeMap<String, String>, _>("job:map:flight").await);
    step("LRANGE", client.lrange::<Vec<String>, _>("job:list:alerts", 0, -1).await);
    step("ZSCORE", client.zscore::<f64, _, _>("job:ranks:delays", "PRG").await);
    if place() != "cluster" {
        step("notifications", notifications(client).await);
    }
}

/// Ask for all texts before the first reply is awaited.
async fn all(client: &Client) -> Result<Vec<String>, Error> {
    let tasks: Vec<_> = all_texts()
        .into_iter()
        .map(|key| {
            let client = client.clone();
            tokio::spawn(async move { client.get::<String, _>(key).await })
        })
        .collect();
    let mut found = Vec::new();
    for task in tasks {
        found.push(task.await.unwrap()?);
    }
    Ok(found)
}

async fn notifications(client: &Client) -> Result<Vec<String>, Error> {
    let listening = Builder::from_config(client.client_config()).build_subscriber_client()?;
    listening.init().await?;
    let mut events = listening.keyspace_event_rx();
    listening.subscribe("__keyspace@0__:job:text:live").await?;
    listening.ping::<Value>(None).await?; // subscribe() does not wait for the server
    ask("put job:text:live 1");
    ask("delete job:text:live");
    let mut found = Vec::new();
    for _ in 0..2 {
        found.push(timeout(WAIT_MAX, events.recv()).await.unwrap().unwrap().operation);
    }
    Ok(found)
}

async fn writes(client: &Client) {
    let given = Some(Expiration::PX(60_000));
    step("SET NX", client.set::<Option<String>, _, _>("own:lock", "me", given.clone(), Some(SetOptions::NX), false).await);
    step("SET NX again", client.set::<Option<String>, _, _>("own:lock", "you", given, Some(SetOptions::NX), false).await);
    step("RPUSH", client.rpush::<i64, _, _>("own:list", vec!["a", "b"]).await);
    step("BLPOP", client.blpop::<(String, String), _>("own:list", 1.0).await);
    step("keys of both", client.mget::<Vec<Option<String>>, _>(vec!["own:lock", "job:text:007", "none"]).await);
    let transaction = client.multi();
    let _: () = transaction.incr("own:counter").await.unwrap();
    let _: () = transaction.get(text(7)).await.unwrap();
    step("MULTI of both", transaction.exec::<(i64, String)>(true).await);
    let script = "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])";
    step("a script", client.eval::<String, _, _, _>(script, "own:text", "d").await);
    step("DEL", client.del::<i64, _>(vec!["own:lock", "own:list", "own:counter", "own:text"]).await);
}

/// Kill the connection of a client at its defaults: its next request waits for ever.
async fn without_policy(client: &Client) {
    let other = Builder::from_config(client.client_config()).build().unwrap();
    other.init().await.unwrap();
    let id = other.client_id::<i64>().await.unwrap();
    let mut errors = other.error_rx(); // the client goes on to call itself connected
    step("CLIENT KILL", client.client_kill::<i64>(vec![ClientKillFilter::ID(id.to_string())]).await);
    timeout(WAIT_MAX, errors.recv()).await.unwrap().unwrap();
    step("without a policy, within 5 s", timeout(Duration::from_secs(5), other.get::<String, _>(text(7))).await);
}

async fn ends(client: &Client) {
    let alone = at_owner(client).await;
    ask("kill job:text:007");
    let end = Instant::now() + WAIT_MAX;
    let mut found = all(client).await;
    while found.is_err() && Instant::now() < end {
        sleep(Duration::from_millis(10)).await;
        found = all(client).await;
    }
    step("after a server's end", found);
    step("a client that knows its address only, within 5 s", timeout(Duration::from_secs(5), alone.get::<String, _>(text(7))).await.map(|found| found.is_ok()));
}

/// Return a client whose configuration has one address, of the node that is going to end.
async fn at_owner(client: &Client) -> Client {
    let state = client.cached_cluster_state().unwrap();
    let node = state.get_server(redis_keyslot(text(7).as_bytes())).unwrap();
    let config = Config { server: ServerConfig::new_clustered(vec![(node.host.to_string(), node.port)]), ..client.client_config() };
    let alone = Builder::from_config(config).set_policy(client.client_reconnect_policy().unwrap()).build().unwrap();
    alone.init().await.unwrap();
    alone
}
